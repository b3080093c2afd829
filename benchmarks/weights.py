"""What it costs to bring a step's weights to a node: `make bench-weights`; a number of megabytes may follow.

Weights in bfloat16 of a float32 model that AdamW trains, at three learning rates: how many bytes travel, what a
core codes and decodes in a second, what memory that takes, and how long it is from the trainer to a node that has
proved what it holds, whole against delta over the same slowed store. The engine's own reload is not in it, for it
is the same on both sides. 64 MB of weights are trained and repeated up to the whole: AdamW in numpy is slow.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.rig.local_run import ROOT
from checkpoint.store import layout
from checkpoint.store.run_store import Store
from checkpoint.stream import chunks, manifest
from checkpoint.stream.manifest import Manifest
from checkpoint.weights import delta, safetensors, scratch
from checkpoint.weights.scratch import Tensor, Written
from policies.model.vocabulary import PolicyVersion
from policies.serving.wire import PolicyRef
from tasks.rollout.policy_folders import PolicyFolders

RATES = (5e-7, 1e-6, 1e-5)
USUAL = 1e-6
TRAINED = 32 * 2**20  # elements
WARM_STEPS = 20
BETAS, EPSILON = (0.9, 0.999), 1e-8  # AdamW's, as TRL leaves them; it decays no weights by default
SIGNAL = 0.3  # of a gradient, that is the same at each step; the rest is noise
LINKS = {"100 MB/s": 100e6, "10 Gbit/s": 1.25e9}

Words = NDArray[np.uint16]
console = Console()


def trained(rate: float) -> tuple[Words, Words]:
    """Weights in bfloat16 before and after one more step of AdamW."""
    draw = np.random.default_rng(0)
    weights = (draw.standard_normal(TRAINED, np.float32) * np.float32(0.02)).astype(np.float32)
    scale = np.exp(draw.standard_normal(TRAINED, np.float32))
    signal = np.float32(SIGNAL) * draw.standard_normal(TRAINED, np.float32)
    mean, square, before = np.zeros_like(weights), np.zeros_like(weights), rounded(weights)
    for step in range(1, WARM_STEPS + 2):
        gradient = scale * (signal + draw.standard_normal(TRAINED, np.float32))
        mean += np.float32(1 - BETAS[0]) * (gradient - mean)
        square += np.float32(1 - BETAS[1]) * (gradient * gradient - square)
        norm = np.sqrt(square / np.float32(1 - BETAS[1] ** step)) + np.float32(EPSILON)
        before = rounded(weights)
        weights -= np.float32(rate / (1 - BETAS[0] ** step)) * mean / norm
    return before, rounded(weights)


def rounded(weights: NDArray[np.float32]) -> Words:
    """To bfloat16, ties to even, as torch does."""
    bits = weights.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def tensors(words: Words, size_bytes: int) -> dict[str, Tensor]:
    """So many bytes of weights, in tensors of the sizes that a model of 7 billion has."""
    content, each = words.view(np.uint8), 4096 * 4096 * 2
    found = {}
    for number in range(size_bytes // each):
        begin = number % (len(content) // each) * each
        found[f"model.layers.{number}.weight"] = Tensor(
            "BF16",
            (4096, 4096),
            each,
            lambda at=begin: content[at : at + each],  # type: ignore[misc]
        )
    return found


class Link(Store):
    """A store behind a link of so many bytes a second, which all transfers share."""

    def __init__(self, url: str, bytes_per_s: float) -> None:
        super().__init__(url)
        self._bytes_per_s, self._free_at_s, self._lock = bytes_per_s, 0.0, threading.Lock()

    def put(self, key: str, data: Any) -> None:
        self._pass(len(data))
        super().put(key, data)

    def get_buffer(self, key: str) -> memoryview:
        data = super().get_buffer(key)
        self._pass(len(data))
        return data

    def _pass(self, size_bytes: int) -> None:
        with self._lock:
            self._free_at_s = max(self._free_at_s, time.monotonic()) + size_bytes / self._bytes_per_s
            wait_s = self._free_at_s - time.monotonic()
        time.sleep(max(0.0, wait_s))


@contextmanager
def peak_anonymous() -> Iterator[Callable[[], int]]:
    """How far the process's own memory, without pages of files, rises meanwhile, in bytes."""
    begun, most, over = _anonymous(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            most[0] = max(most[0], _anonymous() - begun)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: most[0]
    finally:
        over.set()
        thread.join()


def _anonymous() -> int:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


def coded(folder: Path, before: Words, after: Words, size_bytes: int) -> dict[str, float]:
    """On one core, by its processor time: gigabytes of weights a second, the delta's share, memory."""
    with ThreadPoolExecutor(1) as pool:
        ours, theirs, changed = folder / "ours", folder / "theirs", folder / delta.NAME
        with peak_anonymous() as most:  # from the first: what is freed once is not taken again
            base = scratch.rewrite(theirs, tensors(before, size_bytes), "", changed, pool).digest
            first = scratch.rewrite(ours, tensors(before, size_bytes), "", changed, pool)
            begun_s = time.process_time()
            second = scratch.rewrite(ours, tensors(after, size_bytes), first.digest, changed, pool)
            encoded_s = time.process_time() - begun_s
        if second.delta_bytes is None:
            raise SystemExit("a delta of these weights does not pay")
        begun_s = time.process_time()
        delta.apply([changed], theirs, base, pool)
        if safetensors.content_of(theirs, pool) != second.digest:
            raise SystemExit("the weights do not come out")
        decoded_s = time.process_time() - begun_s
    return {
        "ratio": second.delta_bytes / first.size_bytes,
        "encode": first.size_bytes / 1e9 / encoded_s,
        "decode": first.size_bytes / 1e9 / decoded_s,
        "memory": most() / first.size_bytes,
    }


def ready_s(folder: Path, before: Words, after: Words, size_bytes: int, bytes_per_s: float) -> dict[str, float]:
    """Seconds from the trainer's weights to a node that has proved them: by a delta, and whole."""
    store = Link(f"file://{folder}/store", bytes_per_s)
    folders, took_s, base = PolicyFolders(store, folder / "node"), dict[str, float](), ""
    path, changed = folder / layout.MODEL, folder / delta.NAME
    with ThreadPoolExecutor(delta.WORKERS) as pool:
        for step, (kind, words) in enumerate((("", before), ("delta", after), ("whole", before))):
            begun_s = time.perf_counter()
            written = scratch.rewrite(
                path, tensors(words, size_bytes), base if kind == "delta" else "", changed, pool
            )
            ref = published(store, folder, step, written, base)
            got = folders.fetch(ref, lambda: True)
            took_s[kind] = time.perf_counter() - begun_s
            folders.keep_only(got)
            base = written.digest
    return {kind: took_s[kind] for kind in ("delta", "whole")}


def published(store: Store, folder: Path, step: int, written: Written, base: str) -> PolicyRef:
    """Publish what was written as a trainer does."""
    version, name = PolicyVersion(0, step), layout.MODEL if written.delta_bytes is None else delta.NAME
    meta = {manifest.KIND: manifest.WHOLE, manifest.WEIGHTS: written.digest}
    if written.delta_bytes is not None:
        before = PolicyVersion(0, step - 1)
        meta |= {manifest.KIND: manifest.DELTA, manifest.BASE: f"{before}@{base}"}
        meta[manifest.BASE_PREFIX] = layout.policy(before)
    prefix = layout.policy(version)
    sent = chunks.send(store, prefix, [(name, folder / name)], stored={})
    found: Manifest = manifest.publish_once(store, prefix, sent, version, time.time(), meta)
    return PolicyRef(str(version), found.root, written.digest)


def main() -> None:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    size_bytes = int(float(sys.argv[1]) * 1e6) if sys.argv[1:] else 10**9
    figures: dict[str, Any] = {"bytes_ratio": {}, "changed_share": {}}
    for rate in RATES:
        with console.status(f"AdamW at {rate:g}"), tempfile.TemporaryDirectory() as name:
            before, after = trained(rate)
            one = coded(Path(name), before, after, size_bytes)
        figures["changed_share"][f"{rate:g}"] = round(float(np.mean(before != after)), 5)
        figures["bytes_ratio"][f"{rate:g}"] = round(one["ratio"], 5)
        if rate == USUAL:
            usual = before, after
            figures["encode_gb_per_s"], figures["decode_gb_per_s"] = (
                round(one["encode"], 2),
                round(one["decode"], 2),
            )
            figures["extra_memory_share"] = round(one["memory"], 3)
    figures["ready_seconds"], figures["ready_ratio"] = {}, {}
    for link, bytes_per_s in LINKS.items():
        with console.status(f"over {link}"), tempfile.TemporaryDirectory() as name:
            took_s = ready_s(Path(name), *usual, size_bytes, bytes_per_s)
        figures["ready_seconds"][link] = {kind: round(seconds, 2) for kind, seconds in took_s.items()}
        figures["ready_ratio"][link] = round(took_s["whole"] / took_s["delta"], 2)
    console.print(
        f"Conditions: {size_bytes / 1e9:g} GB of weights in bfloat16; coding by processor time of one core; "
        f"ready: at {USUAL:g}, to the node's proof, with {delta.WORKERS} threads.",
        highlight=False,
    )
    out = ROOT / "benchmarks" / "results" / "weights.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(json.dumps(figures, indent=2), highlight=False)


if __name__ == "__main__":
    main()
