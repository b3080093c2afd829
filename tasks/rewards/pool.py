"""Worker processes that score one sample after the other, and are killed where a sample takes too long.

Limits inside a process do not hold: signals reach Python only between two of its instructions and only the main
thread, and a thread cannot be ended at all. What is sent and answered is lines of JSON, which no answer can make
run as code here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil

START_S = 300.0  # importing is the machine's work, not the sample's, and a busy machine takes its time
AT_ONCE = 32  # samples sent in one write: a write for each would be half of the time of a cheap function
WORKERS_MAX = 8
READ_BYTES = 1 << 16

Ending = Literal["scored", "failed", "raised"]


class NoWorker(Exception):
    """Workers do not start; the message says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a sample.

    Args:
        ending: `failed` for one that took more time or memory than there is, or ended its worker; `raised` for one
            with which the function raised.
        why: it did not end with a value.
    """

    ending: Ending
    value: Any = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """For one sample: seconds of the worker's CPU time, and seconds by the clock.

    CPU time hardly depends on what else the machine does, so that the same sample meets the same limit again.
    """

    cpu_s: float
    wall_s: float


@dataclass(slots=True, eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    pending: deque[int] = field(default_factory=deque)  # samples sent and not answered, in order
    is_ready: bool = False
    since_s: float = field(default_factory=time.monotonic)  # the first of them is at work
    since_cpu_s: float = 0.0
    read: bytearray = field(default_factory=bytearray)

    @property
    def is_busy(self) -> bool:
        return bool(self.pending) or not self.is_ready

    @property
    def stdout(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, indices: Sequence[int], samples: Sequence[str]) -> None:
        """Give an idle worker its next samples. It reads them all before it begins."""
        assert self.process.stdin is not None
        self.pending.extend(indices)
        self.begin()
        with contextlib.suppress(BrokenPipeError):  # then its output ends, too
            self.process.stdin.write(f"[{','.join(samples[index] for index in indices)}]\n".encode("ascii"))
            self.process.stdin.flush()

    def begin(self) -> None:
        self.since_s, self.since_cpu_s = time.monotonic(), self._cpu_s()

    def left_s(self, limits: Limits) -> float:
        """How long nothing needs to be done about it."""
        wall_s = (limits.wall_s if self.is_ready else START_S) - (time.monotonic() - self.since_s)
        if not self.is_ready:
            return wall_s
        return min(wall_s, limits.cpu_s - (self._cpu_s() - self.since_cpu_s))

    def lines(self) -> list[bytes] | None:
        """What it has answered since; None where it has ended."""
        received = os.read(self.stdout, READ_BYTES)
        if not received:
            return None
        if b"\n" not in received:  # part of a long line: looked through once, not with each part
            self.read += received
            return []
        *whole, rest = (self.read + received).split(b"\n")
        self.read = bytearray(rest)
        return [bytes(line) for line in whole]

    def kill(self) -> str:
        """End it with all that it started. Returns how it had ended, or what it said last."""
        # A sandbox's first process is another user's by now, so that bubblewrap's own end does not reach it.
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        said = b"" if self.process.stderr is None else self.process.stderr.read(READ_BYTES)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        return last or f"it ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"

    def _cpu_s(self) -> float:
        # The clock of another process, as clock_getcpuclockid(3) makes it of a process id.
        try:
            return time.clock_gettime((~self.process.pid << 3) | 2)
        except OSError:  # it has ended, and is noticed by its output
            return self.since_cpu_s


class Pool:
    """Workers of one kind. They start with the first samples, and stay for the next ones."""

    def __init__(
        self,
        start: Callable[[], subprocess.Popen[bytes]],
        workers: int | None = None,
        at_once: int = AT_ONCE,
    ) -> None:
        """Args:
        start: starts a worker in a session of its own, with pipes as stdin and stdout. It writes `null` once it is
            ready, or a text of why it cannot be; for each list of samples that it reads it writes an answer each,
            [ending, value, why].
        workers: how many; None: as many as this process has cores to itself, less one half.
        at_once: samples that a worker is sent together.
        """
        self._start = start
        self._count = workers or _share_of_cores()
        self._at_once = at_once
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()

    def map(self, samples: Sequence[Any], limits: Limits) -> list[Answer]:
        """Return what became of each sample, in order. Raises NoWorker; TypeError for what is no JSON."""
        written = [json.dumps(sample) for sample in samples]  # ASCII alone, lone surrogates too
        with self._lock:
            try:
                return self._map(written, limits)
            except BaseException:
                self._end_all()  # what is half done would be answered next time
                raise

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            self._end_all()

    def _map(self, samples: list[str], limits: Limits) -> list[Answer]:
        answers: dict[int, Answer] = {}
        todo = deque(range(len(samples)))
        for worker in [one for one in self._workers if one.process.poll() is not None]:
            self._lose(worker, "", answers, todo)  # killed since the last call: that is no sample's fault
        while len(answers) < len(samples):
            while len(self._workers) < min(self._count, len(samples) - len(answers)):
                self._add()
            for worker in self._workers:
                if worker.is_ready and not worker.pending and todo:
                    count = min(self._at_once, math.ceil(len(todo) / len(self._workers)))
                    worker.send([todo.popleft() for _ in range(count)], samples)
            self._listen(limits, answers, todo)
        return [answers[index] for index in range(len(samples))]

    def _listen(self, limits: Limits, answers: dict[int, Answer], todo: deque[int]) -> None:
        busy = [worker for worker in self._workers if worker.is_busy]
        left_s = min(worker.left_s(limits) for worker in busy)
        for key, _ in self._selector.select(max(0.0, left_s)):
            worker: _Worker = key.data
            lines = worker.lines()
            if lines is None:
                self._lose(worker, "", answers, todo)
                continue
            for line in lines:
                _take(worker, json.loads(line), answers)
        for worker in busy:
            if worker in self._workers and worker.is_busy and worker.left_s(limits) <= 0.0:
                self._lose(worker, "it took longer than its limit", answers, todo)

    def _lose(self, worker: _Worker, why: str, answers: dict[int, Answer], todo: deque[int]) -> None:
        """End a worker. What it was at has failed; what it had not begun is another's."""
        self._workers.remove(worker)
        self._selector.unregister(worker.stdout)
        ended = worker.kill()
        if not worker.is_ready:
            raise NoWorker(why or ended)
        if worker.pending:
            answers[worker.pending.popleft()] = Answer("failed", why=why or f"its worker died: {ended}")
            todo.extendleft(reversed(worker.pending))

    def _add(self) -> None:
        worker = _Worker(self._start())
        self._workers.append(worker)
        self._selector.register(worker.stdout, selectors.EVENT_READ, worker)

    def _end_all(self) -> None:
        for worker in self._workers:
            self._selector.unregister(worker.stdout)
            worker.kill()
        self._workers.clear()


def _take(worker: _Worker, said: Any, answers: dict[int, Answer]) -> None:
    if worker.is_ready:
        answers[worker.pending.popleft()] = Answer(*said)
        worker.begin()
    elif said is None:
        worker.is_ready = True
    else:
        raise NoWorker(str(said))


def _share_of_cores() -> int:
    """Half of the cores, over the trainer's processes on this machine: torch works on the others."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(WORKERS_MAX, len(os.sched_getaffinity(0)) // (2 * ranks)))
