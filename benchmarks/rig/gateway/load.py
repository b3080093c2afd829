"""Requests sent to a balancer in front of stand-ins, and what came of them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rig.gateway.balancers import LOAD_CPU, NOBODY, START_S, Ask, Running, Stand, System, pin
from benchmarks.rig.gateway.fakes import BUILD, FakeVllm, expected_digest

WARM_UP = 48  # requests


@dataclass(frozen=True, slots=True)
class Answer:
    """What came for one request. `right`: all of it, and correct. `done_s` is None for one that never ended."""

    right: bool
    tokens: int
    begun_s: float
    done_s: float | None


class Call:
    """Requests on their way, sent by the C client; the clock is `time.monotonic`.

    Args:
        stand: where the client runs.
        system, running: who is asked.
        asks: for what.
        connections: how many at a time; a batch takes one.
        deadline_s: what has not ended by then has failed.
    """

    def __init__(
        self,
        stand: Stand,
        system: System,
        running: Running,
        asks: Sequence[Ask],
        connections: int,
        deadline_s: float,
    ) -> None:
        self._asks = asks
        file = stand.folder / "requests"
        with file.open("wb") as out:
            for request in system.requests(asks):
                out.write(b"%d\n" % len(request) + request)
        batch = ["--batch", str(len(asks))] if system.batch else []
        command = [str(BUILD / "load"), "--deadline-s", str(deadline_s), *batch, running.host, str(running.port)]
        self._process = subprocess.Popen(
            [*pin(LOAD_CPU, stand.pinned), *command, str(1 if system.batch else connections), str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self._out = self._process.stdout
        line = self._out.readline()
        if not line:
            raise RuntimeError(f"{system.name} does not take connections")
        self.begun_s = int(line) / 1e9
        self._said: list[str] = []

    def answers(self) -> list[Answer]:
        """Wait for the end and return what came for each."""
        lines = self.wait()
        return [_answer(ask, line) for ask, line in zip(self._asks, lines, strict=True)]

    def wait(self) -> list[str]:
        """Wait for the end and return what the client said."""
        if not self._said:
            self._said = self._out.read().splitlines()
            if self._process.wait() != 0:
                raise RuntimeError("the client failed")
        return self._said


def _answer(ask: Ask, line: str) -> Answer:
    finished, _, tokens, digest, begun_ns, done_ns = map(int, line.split())
    right = finished == 1 and tokens == ask.max_tokens
    right = right and digest == expected_digest(ask.seed, ask.prompt, ask.max_tokens)
    return Answer(right, tokens, begun_ns / 1e9, done_ns / 1e9 if done_ns else None)


def start(system: System, stand: Stand) -> Running:
    """Start the balancer and return once each of its servers has answered through it. Raises RuntimeError."""
    running = system.start(stand)
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if running.process.poll() is not None:
            break
        before = [fake.counts().finished for fake in stand.fakes]
        if warm_up(stand, system, running, WARM_UP):
            served = [fake.counts().finished > count for fake, count in zip(stand.fakes, before, strict=True)]
            if all(served) or system.name == NOBODY:
                return running
        time.sleep(0.5)
    raise RuntimeError(f"{system.name} did not come up: {(stand.folder / 'log').read_text()[-2000:]}")


def warm_up(stand: Stand, system: System, running: Running, count: int) -> bool:
    """Ask for `count` short completions at once. Return whether all came."""
    try:
        call = Call(stand, system, running, system.asks(count, 2), count, deadline_s=5.0)
    except RuntimeError:
        return False
    return all(answer.right for answer in call.answers())


def make_stand(
    folder: Path, hosts: Sequence[str], exits: ExitStack, *, step_us: int, pinned: bool, doubling: int = 0
) -> Stand:
    """Start stand-ins with these addresses, in a folder of their own."""
    folder.mkdir()
    fakes = []
    for host in hosts:
        fake = FakeVllm(host, folder, step_us, pin(LOAD_CPU, pinned), doubling)
        exits.callback(fake.end)
        fakes.append(fake)
    return Stand(folder, fakes, exits, pinned)
