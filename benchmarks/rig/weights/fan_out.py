"""How much of a policy the store sends when n nodes fetch it at once: with peers, without, and with one killed.

Nodes are processes, under TLS between each other; the store is a real S3 server behind a link that all share.
Alone: `python -m benchmarks.rig.weights.fan_out`; a number of megabytes may follow.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from benchmarks.rig.local_run import ROOT
from benchmarks.rig.weights.narrow_link import NarrowLink, narrow_link
from benchmarks.store import any_server
from checkpoint.store import layout
from checkpoint.store.run_store import OPTIONS_ENV, Store
from checkpoint.stream import chunks, manifest
from policies.model.vocabulary import PolicyVersion
from policies.serving.wire import PolicyRef

NODES = (1, 2, 5, 10)
LINK_BYTES_PER_S = 40e6
CHUNK_BYTES = 4 * 2**20  # so that the usual size has as many chunks as a delta of a large model
KILLED_AT = 0.4  # of the policy that the store has sent
ANSWER_S = 600.0  # several times what ten nodes take for 256 MB without peers, on a loaded machine


@dataclass(frozen=True, slots=True)
class Fetched:
    """What n nodes at once took: bytes read from the store over bytes of the policy; seconds until all had it."""

    ratio: float
    seconds: float


class Rig:
    """A published policy behind the narrow link."""

    def __init__(self, folder: Path, link: NarrowLink, url: str, size_bytes: int) -> None:
        self._folder = folder
        self._link = link
        self._url = url
        self._size_bytes = size_bytes
        source = folder / "policy"
        source.mkdir()
        (source / layout.MODEL).write_bytes(os.urandom(size_bytes))
        version = PolicyVersion(0, 1)
        with patch.object(chunks, "CHUNK_BYTES", CHUNK_BYTES):
            found = manifest.publish(Store(url), layout.policy(version), source, version, time.time())
        self._ref = msgspec.json.encode(PolicyRef(str(version), found.root, found.digest)).decode()
        self._tries = 0

    def fetch(self, count: int, *, peers: bool, kill: bool = False) -> Fetched:
        """Have so many new nodes fetch it at once; with `kill` one of them dies on the way."""
        self._tries += 1
        begun_bytes = self._link.passed_bytes
        with ExitStack() as stack:
            nodes = [stack.enter_context(self._node(number, peers)) for number in range(count)]
            addresses = [answer(node, ANSWER_S) for node in nodes]
            for said in (json.dumps(addresses), "go"):
                for node in nodes:
                    assert node.stdin is not None
                    node.stdin.write(f"{said}\n")
                    node.stdin.flush()
                if said != "go":
                    assert all(answer(node, ANSWER_S) == "ready" for node in nodes)
            if kill:
                kill_s = time.monotonic() + ANSWER_S
                while self._link.passed_bytes - begun_bytes < KILLED_AT * self._size_bytes:
                    if time.monotonic() > kill_s:
                        raise SystemExit(f"the store's link has sent too little within {ANSWER_S:g} s")
                    time.sleep(0.01)
                nodes[0].kill()
            took_s = [float(answer(node, ANSWER_S)) for node in nodes[kill:]]
        ratio = (self._link.passed_bytes - begun_bytes) / self._size_bytes
        fetched = Fetched(round(ratio, 2), round(max(took_s), 1))
        print(f"{count} nodes, {peers=}, {kill=}: {fetched}", file=sys.stderr)
        return fetched

    @contextmanager
    def _node(self, number: int, peers: bool) -> Iterator[subprocess.Popen[str]]:
        folder = self._folder / f"{self._tries}-{number}"
        module = "benchmarks.rig.weights.fan_out_node"
        python = [sys.executable, "-X", "faulthandler", "-m", module]
        argv = [*python, self._url, str(folder), str(CHUNK_BYTES), self._ref, str(peers)]
        with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node:
            try:
                yield node
            finally:
                node.kill()


def answer(node: subprocess.Popen[str], limit_s: float) -> str:
    """The one line that it says next. One that says nothing is ended, by a signal at which Python's faulthandler
    prints where its threads are. Raises SystemExit naming it."""
    assert node.stdout is not None
    if not select.select([node.stdout], [], [], limit_s)[0]:
        node.send_signal(signal.SIGABRT)
        node.stdout.read()  # until it has ended
        raise SystemExit(f"node {node.pid} says nothing within {limit_s:g} s: {node.args!r}")
    if line := node.stdout.readline():
        return line.strip()
    raise SystemExit(f"node {node.pid} ended: {node.args!r}")


def fan_out(size_bytes: int = 256 * 10**6, counts: Sequence[int] = NODES) -> dict[str, Any]:
    """The figures, by key; those by number of nodes have it as text."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        server_name, server = stack.enter_context(any_server(folder / "server"))
        link = stack.enter_context(narrow_link(int(server.endpoint.rpartition(":")[2]), LINK_BYTES_PER_S))
        options = json.dumps(server.at(link.endpoint).options())
        stack.enter_context(patch.dict(os.environ, {OPTIONS_ENV: options}))
        rig = Rig(folder, link, server.url("fan-out"), size_bytes)
        among = {str(count): rig.fetch(count, peers=True) for count in counts}
        alone = {str(count): rig.fetch(count, peers=False) for count in counts}
        killed = rig.fetch(max(counts), peers=True, kill=True)
    return {
        "fan_out": {count: one.ratio for count, one in among.items()},
        "fan_out_without_peers": {count: one.ratio for count, one in alone.items()},
        "fan_out_one_killed": killed.ratio,
        "fan_out_seconds": {count: one.seconds for count, one in among.items()},
        "fan_out_seconds_without_peers": {count: one.seconds for count, one in alone.items()},
        "fan_out_seconds_one_killed": killed.seconds,
        "fan_out_conditions": f"{server_name}, {LINK_BYTES_PER_S / 1e6:g} MB/s for all, {size_bytes / 1e6:g} MB",
    }


if __name__ == "__main__":
    megabytes = float(sys.argv[1]) if sys.argv[1:] else 256.0
    print(json.dumps(fan_out(int(megabytes * 1e6)), indent=2))
