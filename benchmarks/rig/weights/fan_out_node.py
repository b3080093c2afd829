"""One node of `benchmarks.rig.weights.fan_out`, in a process of its own: `... URL FOLDER CHUNK_BYTES REF PEERS`.

Says where its peers find it, reads where they are, connects to them and says so; at the next line fetches the
policy of the wire's PolicyRef REF, says how long that took, and serves until its input ends.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import wait
from pathlib import Path

import msgspec
import structlog

from checkpoint.store.run_store import Store
from checkpoint.stream import chunks
from policies.serving.wire import PolicyRef
from tasks.peers.peers import Peers
from tasks.rollout.policy_folders import PolicyFolders

# 0.0.0.0 is not loopback, so that nodes are under TLS, and Linux takes it for this machine.
HOST, TOKEN = "0.0.0.0", "of the benchmark"


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for the answers
    url, folder, chunk_bytes, ref, among_peers = sys.argv[1:]
    chunks.CHUNK_BYTES = int(chunk_bytes)
    with Peers(HOST, TOKEN) as peers:
        print(peers.address, flush=True)
        wait(peers.know(json.loads(sys.stdin.readline())))
        print("ready", flush=True)
        sys.stdin.readline()
        folders = PolicyFolders(Store(url), Path(folder), peers if among_peers == "True" else None)
        begun_s = time.perf_counter()
        folders.fetch(msgspec.json.decode(ref, type=PolicyRef), lambda: True)
        print(time.perf_counter() - begun_s, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
