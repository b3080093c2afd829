"""Stand-ins for vLLM, and the client that asks them: the C programs beside this file, compiled and driven.

What they say of tokens is checked here: the digest that the client makes of a completion's tokens must be that of
the tokens which seed and prompt demand.
"""

from __future__ import annotations

import http.client
import json
import mmap
import struct
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.rig.local_run import ROOT

BUILD = ROOT / "build" / "bench"
PORT = 8000
_MASK = 2**64 - 1
_COUNTS, _RECORD = struct.Struct("5Q"), struct.Struct("3Q")
Prompt = tuple[int, ...] | str


def compile_programs() -> None:
    """Compile the stand-in and the client. Raises subprocess.CalledProcessError."""
    BUILD.mkdir(parents=True, exist_ok=True)
    for name in ("fake_vllm", "load"):
        source = Path(__file__).with_name(f"{name}.c")
        subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-o", BUILD / name, source], check=True)


@dataclass(frozen=True, slots=True)
class Counts:
    """What a stand-in has done since its start; tokens `made`, and those of them that were `sent`."""

    requests: int
    finished: int
    aborted: int
    made: int
    sent: int


class FakeVllm:
    """One stand-in in a process of its own.

    Args:
        host: the address it has for itself; its port is PORT.
        folder: where its counts are kept.
        step_us: it makes a token every so many microseconds for each request, and an event of each.
        prefix: the command's beginning.
        doubling: so many requests make a token take twice as long; 0: none do.
    """

    def __init__(self, host: str, folder: Path, step_us: int, prefix: Sequence[str], doubling: int = 0) -> None:
        self.host, self.address = host, f"{host}:{PORT}"
        stats = folder / f"{host}.stats"
        command = [*prefix, str(BUILD / "fake_vllm"), "--step-us", str(step_us), "--doubling", str(doubling)]
        command += ["--stats", str(stats)]
        self.process = subprocess.Popen([*command, host, str(PORT)], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise RuntimeError(f"no stand-in at {self.address}")
        with stats.open("rb") as file:
            self._stats = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def counts(self) -> Counts:
        """Its counts now; they can be read when it is dead, too."""
        return Counts(*_COUNTS.unpack_from(self._stats))

    def set_pace(self, step_us: int, interval: int) -> None:
        """Change its pace: a token every `step_us`, an event every `interval` tokens."""
        connection = http.client.HTTPConnection(self.address, timeout=5.0)
        connection.request("POST", "/pace", json.dumps({"step_us": step_us, "interval": interval}))
        connection.getresponse().read()
        connection.close()

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()

    def finished_since(self, count: int) -> Iterator[tuple[int, int, int]]:
        """Seed, time of arrival and time of the last token, in nanoseconds, of all requests but the first ones."""
        for number in range(count, self.counts().finished):
            yield _RECORD.unpack_from(self._stats, _COUNTS.size + number * _RECORD.size)


def _chain(state: int, token: int) -> int:
    state = ((state ^ token) * 0x9E3779B97F4A7C15) & _MASK
    return state ^ (state >> 32)


@cache
def expected_digest(seed: int, prompt: Prompt, count: int) -> int:
    """The client's digest of the whole completion of `count` tokens."""
    state, digest = _chain(0, seed), 0
    for token in prompt.encode() if isinstance(prompt, str) else prompt:
        state = _chain(state, token)
    for _ in range(count):
        token = (state >> 16) % 50_000
        state, digest = _chain(state, token), _chain(digest, token)
    return digest
