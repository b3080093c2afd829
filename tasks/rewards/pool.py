"""Worker processes that score samples one after another, and are killed if a sample exceeds its limits.

A process cannot enforce such limits on itself: Python handles signals only in its main thread and between two of
its instructions, and a thread cannot be killed. Samples and answers are lines of JSON, which cannot run code here.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil

START_S = 300.0  # for imports on a busy machine, which do not count against a sample
WORKERS_MAX = 8
READ_BYTES = 1 << 16

Ending = Literal["scored", "failed", "raised"]


class NoWorker(Exception):
    """Workers do not start. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of one sample.

    Args:
        ending: `failed` if the sample exceeded its time or memory, or ended its worker; `raised` if the function
            raised.
        reason: the reason for an ending other than `scored`.
    """

    ending: Ending
    value: Any = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one sample: CPU time of the worker, and wall time.

    CPU time hardly depends on the machine's load, so a sample behaves the same each time.
    """

    cpu_s: float
    wall_s: float


@dataclass(slots=True, eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    sample: int | None = None  # index of the sample that it scores
    is_ready: bool = False
    started_at_s: float = field(default_factory=time.monotonic)  # of its sample
    started_at_cpu_s: float = 0.0
    partial_line: bytearray = field(default_factory=bytearray)

    @property
    def is_busy(self) -> bool:
        return self.sample is not None or not self.is_ready

    @property
    def stdout(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, index: int, sample: str) -> None:
        """Send an idle worker its next sample, and no further one: a program in a sandbox could read it."""
        assert self.process.stdin is not None
        self.sample, self.started_at_s, self.started_at_cpu_s = index, time.monotonic(), self._cpu_s()
        with contextlib.suppress(BrokenPipeError):  # its output ends as well, which `line` reports
            self.process.stdin.write(f"{sample}\n".encode("ascii"))
            self.process.stdin.flush()

    def left_s(self, limits: Limits) -> float:
        """Return the seconds until a limit expires."""
        wall_s = (limits.wall_s if self.is_ready else START_S) - (time.monotonic() - self.started_at_s)
        if not self.is_ready:
            return wall_s
        return min(wall_s, limits.cpu_s - (self._cpu_s() - self.started_at_cpu_s))

    def line(self) -> bytes | None:
        """Read what the worker has written: its line, empty until it is whole. Returns None if it has ended."""
        received = os.read(self.stdout, READ_BYTES)
        if not received:
            return None
        self.partial_line += received
        if not received.endswith(b"\n"):
            return b""
        line, self.partial_line = bytes(self.partial_line), bytearray()
        return line

    def kill(self) -> str:
        """Kill the worker and its descendants. Returns the last line of its stderr, or how it had ended."""
        # A sandbox's first process has changed its user, so bubblewrap cannot kill it when it dies.
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        stderr = b"" if self.process.stderr is None else self.process.stderr.read(READ_BYTES)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        last = stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return last or f"it ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"

    def _cpu_s(self) -> float:
        # The CPU clock of another process, computed from its id like clock_getcpuclockid(3).
        try:
            return time.clock_gettime((~self.process.pid << 3) | 2)
        except OSError:  # it has ended, which `line` reports
            return self.started_at_cpu_s


class Pool:
    """Workers of one kind. They start with the first samples, and stay for later calls."""

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        """Args:
        start: starts a worker in its own session, with pipes as stdin and stdout. The worker writes `null` once
            ready, or an error text. It answers each line, a sample, by [ending, value, why].
        """
        self._start = start
        self._count = _share_of_cores()
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()

    def map(self, samples: Sequence[Any], limits: Limits) -> list[Answer]:
        """Return the answers to the samples, in order. Raises NoWorker; TypeError if a sample is not JSON."""
        encoded = [json.dumps(sample) for sample in samples]  # ASCII, even lone surrogates
        with self._lock:
            try:
                return self._map(encoded, limits)
            except BaseException:
                self._end_all()  # a sample under way would be answered in the next call
                raise

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            self._end_all()

    def _map(self, samples: list[str], limits: Limits) -> list[Answer]:
        answers: dict[int, Answer] = {}
        todo = enumerate(samples)
        for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
            self._lose(worker, "", answers)  # killed since the last call, which is not a sample's fault
        while len(answers) < len(samples):
            while len(self._workers) < min(self._count, len(samples) - len(answers)):
                worker = _Worker(self._start())
                self._workers.append(worker)
                self._selector.register(worker.stdout, selectors.EVENT_READ, worker)
            for worker in self._workers:
                if not worker.is_busy and (numbered := next(todo, None)) is not None:
                    worker.send(*numbered)
            self._receive(limits, answers)
        return [answers[index] for index in range(len(samples))]

    def _receive(self, limits: Limits, answers: dict[int, Answer]) -> None:
        busy = [worker for worker in self._workers if worker.is_busy]
        left_s = min(worker.left_s(limits) for worker in busy)
        for key, _ in self._selector.select(max(0.0, left_s)):
            worker: _Worker = key.data
            line = worker.line()
            if line is None:
                self._lose(worker, "", answers)
            elif line:
                _take(worker, json.loads(line), answers)
        for worker in busy:
            if worker in self._workers and worker.is_busy and worker.left_s(limits) <= 0.0:
                self._lose(worker, "it exceeded its time limit", answers)

    def _lose(self, worker: _Worker, why: str, answers: dict[int, Answer]) -> None:
        """Kill a worker. Its sample has failed."""
        self._workers.remove(worker)
        self._selector.unregister(worker.stdout)
        ended = worker.kill()
        if not worker.is_ready:
            raise NoWorker(why or ended)
        if worker.sample is not None:
            answers[worker.sample] = Answer("failed", reason=why or f"its worker died: {ended}")

    def _end_all(self) -> None:
        for worker in self._workers:
            self._selector.unregister(worker.stdout)
            worker.kill()
        self._workers.clear()


def _take(worker: _Worker, message: Any, answers: dict[int, Answer]) -> None:
    if worker.sample is not None:
        answers[worker.sample] = Answer(*message)
        worker.sample = None
    elif message is None:
        worker.is_ready = True
    else:
        raise NoWorker(str(message))


def _share_of_cores() -> int:
    """Divide half of the cores among the trainer's processes on this machine; torch uses the other half."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(WORKERS_MAX, len(os.sched_getaffinity(0)) // (2 * ranks)))
