"""What it costs to bring a step's weights to a node: `make bench-weights`; a number of megabytes may follow.

Weights in bfloat16 of a float32 model that AdamW trains, at three learning rates: how many bytes travel, what a
core codes and decodes in a second, what memory that takes, and how long it is from the trainer to a node that has
proved what it holds, whole against delta over the same slowed store. Then how long a real engine serves nobody
while it takes a delta, what a node that joins waits for, and what many at once read of the store. 64 MB of weights
are trained and repeated up to the whole: AdamW in numpy is slow.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
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

from benchmarks.rig.local_run import NODE_PYTHON, ROOT
from benchmarks.rig.weights.joining import join_compiled_s, join_s
from benchmarks.rig.weights.links import Link, paced_s3
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import chunks, manifest
from grpo_orch.checkpoint.stream.chunks import ChunkUpload
from grpo_orch.checkpoint.weights import delta, safetensors, scratch
from grpo_orch.checkpoint.weights.scratch import Tensor
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import PolicyRef
from grpo_orch.tasks.rollout.policy_folders import PolicyFolders

RATES = (5e-7, 1e-6, 1e-5)
USUAL = 1e-6
TRAINED = 32 * 2**20  # elements
WARM_STEPS = 20
BETAS, EPSILON = (0.9, 0.999), 1e-8  # AdamW's, as TRL leaves them; it decays no weights by default
STRIDE = 999_983  # bytes, a prime: no two tensors begin at one place, nor so that their chunks are alike
SIGNAL = 0.3  # of a gradient, that is the same at each step; the rest is noise
# Of a store, in bytes a second, and how many times the weights travel over it.
LINKS = (("10 Gbit/s", 1.25e9, 1), ("100 MB/s", 100e6, 1), ("100 MB/s", 100e6, 4))
RANKS = (16, 64)  # of adapters
# Of Qwen2.5: hidden, inner and key-value sizes, layers, parameters.
SHAPES = {"7B": (3584, 18944, 512, 28, 7.616e9), "32B": (5120, 27648, 1024, 64, 32.76e9)}
TRANSFERS = (6, 64)  # at a time, as earlier releases had and as a machine of 16 cores has now
JOIN_BYTES_PER_S = 20_000  # of 0.4 MB, so that it travels about as long as vLLM starts
PACED_BYTES_PER_S = 10e6  # of each transfer: S3 gives 85 to 90 MB, of which two cores carry few

Words = NDArray[np.uint16]
RESULTS = ROOT / "benchmarks" / "results" / "weights.json"
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
    """So many bytes of weights, in tensors of the sizes that a model of 7 billion has. Each begins elsewhere in
    what was trained: were they repeated as they are, a store of chunks named by content would get each once."""
    content, each = words.view(np.uint8), 4096 * 4096 * 2
    found = {}
    for number in range(size_bytes // each):
        begin = number * STRIDE % (len(content) - each) // 2 * 2
        found[f"model.layers.{number}.weight"] = Tensor(
            "BF16",
            (4096, 4096),
            each,
            lambda at=begin: content[at : at + each],  # type: ignore[misc]
        )
    return found


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


def staged_s(
    folder: Path, before: Words, after: Words, size_bytes: int, bytes_per_s: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds from the trainer's weights to a node whose engine may take them, and those of processors: as a
    delta, and as a whole policy, proved, that is written, then sent, or sent while it is written."""
    store = Link(f"file://{folder}/store", math.inf)
    folders, base = PolicyFolders(store, folder / "node"), ""
    took_s, worked_s = dict[str, float](), dict[str, float]()
    with ThreadPoolExecutor(delta.WORKERS) as pool:
        for step, kind in enumerate(("", "ours", "whole", "whole_streamed")):
            if kind:  # the base, which node and trainer hold already, need not travel slowly
                store.bytes_per_s = bytes_per_s
            new = tensors(after if step % 2 else before, size_bytes)
            begun_s, idle_s = time.perf_counter(), time.process_time()
            ref = published(store, folder, step, new, base if kind == "ours" else "", pool, kind != "whole")
            staged = kind == "ours" and folders.stage(ref, base, lambda: True)
            got = folders.fetch(ref, lambda: True) if not staged else None
            took_s[kind], worked_s[kind] = time.perf_counter() - begun_s, time.process_time() - idle_s
            folders.keep_only(got or folders.settle(ref, lambda: True))
            base = ref.digest
    del took_s[""], worked_s[""]
    return took_s, worked_s


def published(
    store: Store,
    folder: Path,
    step: int,
    new: dict[str, Tensor],
    base: str,
    pool: ThreadPoolExecutor,
    streams: bool,
) -> PolicyRef:
    """Publish weights as a trainer does, which streams them, or as one that does not."""
    version, prefix = PolicyVersion(0, step), layout.policy(PolicyVersion(0, step), (0, 1, 1))
    path, changed = folder / layout.MODEL, folder / delta.NAME
    with ChunkUpload(store, prefix, stored={}) as sending:
        grown = sending.send_prefix if streams else lambda *_: None
        written = scratch.rewrite(path, new, base, changed, pool, grown)
        meta = {manifest.KIND: manifest.WHOLE, manifest.WEIGHTS: written.digest}
        file = (layout.MODEL, path)
        if written.delta_bytes is not None:
            before, file = PolicyVersion(0, step - 1), (delta.NAME, changed)
            meta |= {manifest.KIND: manifest.DELTA, manifest.BASE: f"{before}@{base}"}
            meta[manifest.BASE_PREFIX] = layout.policy(before, (0, 1, 1))
        manifest.publish_once(store, prefix, sending.finish([file]), version, time.time(), meta)
    return PolicyRef(str(version), prefix, written.digest)


def sent_s(folder: Path, size_bytes: int) -> dict[int, float]:
    """Seconds in which so many transfers at a time send a file to a store that gives each PACED_BYTES_PER_S."""
    path, took_s = folder / "file", dict[int, float]()
    with path.open("wb") as file:
        for number in range(0, size_bytes, chunks.CHUNK_BYTES):
            file.write(np.random.default_rng(number).bytes(chunks.CHUNK_BYTES))
    with paced_s3(PACED_BYTES_PER_S) as store:
        for transfers in TRANSFERS:
            begun_s = time.perf_counter()
            with ChunkUpload(store, "root", stored={}, transfers=transfers) as sending:
                sending.finish([("file", path)])
            took_s[transfers] = time.perf_counter() - begun_s
    return took_s


def pauses(share: float) -> dict[str, float]:
    """Seconds of a real engine's pause by part, where this share of its elements changes."""
    with tempfile.TemporaryDirectory() as name:
        command = [str(NODE_PYTHON), "-m", "benchmarks.rig.weights.pause", name, str(share)]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def adapter_share(rank: int, model: str) -> float:
    """Bytes of an adapter on every linear layer, as a share of the model's, both in bfloat16: by shapes."""
    hidden, inner, kv, layers, parameters = SHAPES[model]
    linear = [(hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden)]
    linear += [(hidden, inner), (hidden, inner), (inner, hidden)]
    return layers * sum(rank * (inputs + outputs) for inputs, outputs in linear) / parameters


class Figures:
    """What is measured, written after each part: one that fails takes nothing from those before it."""

    def __init__(self) -> None:
        self.all: dict[str, Any] = {"bytes_ratio": {}, "changed_share": {}, "ready_s": {}}
        self.all |= {"ready_cpu_s": {}, "ready_ratio": {}, "part_s": {}}

    @contextmanager
    def part(self, what: str) -> Iterator[Path]:
        """Measure in a folder that is there for as long."""
        begun_s = time.monotonic()
        with console.status(what), tempfile.TemporaryDirectory() as name:
            yield Path(name)
        self.all["part_s"][what] = round(time.monotonic() - begun_s, 1)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(self.all, indent=2) + "\n")


def main() -> None:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    size_bytes = int(float(sys.argv[1]) * 1e6) if sys.argv[1:] else 10**9
    figures = Figures()
    found = figures.all
    found["weights_gb"], found["load"] = size_bytes / 1e9, os.getloadavg()[0]
    found["adapter_bytes_ratio"] = {
        f"{model}, {rank}": round(adapter_share(rank, model), 4) for model in SHAPES for rank in RANKS
    }
    for rate in RATES:
        with figures.part(f"AdamW at {rate:g}") as folder:
            before, after = trained(rate)
            one = coded(folder, before, after, size_bytes)
            found["changed_share"][f"{rate:g}"] = round(float(np.mean(before != after)), 5)
            found["bytes_ratio"][f"{rate:g}"] = round(one["ratio"], 5)
            if rate == USUAL:
                usual = before, after
                found["encode_gb_per_s"] = round(one["encode"], 2)
                found["decode_gb_per_s"] = round(one["decode"], 2)
                found["extra_memory_share"] = round(one["memory"], 3)
    for link, bytes_per_s, times in LINKS:
        name = f"{times * size_bytes / 1e9:g} GB, {link}"
        with figures.part(name) as folder:
            took_s, worked_s = staged_s(folder, *usual, times * size_bytes, bytes_per_s)
            found["ready_s"][name] = {kind: round(seconds, 2) for kind, seconds in took_s.items()}
            found["ready_cpu_s"][name] = {kind: round(seconds, 2) for kind, seconds in worked_s.items()}
            found["ready_ratio"][name] = round(took_s["whole"] / took_s["ours"], 2)
    found["publish_to_first_token_s"] = {**found["ready_s"][name], "trl": None}
    found["why"] = {
        "publish_to_first_token_s": f"{name}: until an engine may take the weights; what it then takes is pause_s",
        "publish_to_first_token_s.trl": "TRL's client sends weights by NCCL, which needs GPUs",
    }
    with figures.part("transfers") as folder:
        few, many = sent_s(folder, size_bytes).values()
        found["transfers_ratio"] = {f"{TRANSFERS[0]} to {TRANSFERS[1]}": round(few / many, 2)}
    with figures.part("an engine that changes weights"):
        parts = pauses(found["changed_share"][f"{USUAL:g}"])
        found["pause_share"] = round(parts.pop("pause_share"), 2)
        found["pause_s"] = {part: round(took, 3) for part, took in parts.items() if part != "weights_bytes"}
    with figures.part("a node that joins") as folder:
        found["join_s"] = {"slow store": join_s(folder, JOIN_BYTES_PER_S)}
    with figures.part("nodes that join and compile") as folder:
        found["join_s"] |= join_compiled_s(folder)
    console.print(
        f"Conditions: {size_bytes / 1e9:g} GB of weights in bfloat16; coding by processor time of one core; "
        f"ready: at {USUAL:g}, with {delta.WORKERS} threads, to a delta that the engine may take (ours), and to a "
        "whole policy that is proved, sent after or while it is written.",
        highlight=False,
    )
    console.print(json.dumps(found, indent=2), highlight=False)


if __name__ == "__main__":
    main()
