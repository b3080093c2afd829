"""Runs agents in processes of their own, forked from one that has imported the agent, in milliseconds.

Three kinds of process, all started by `tasks.agents.processes` in the trainer:

- The host imports the agent's module once. It forks a keeper for each socket that it receives.
- A keeper writes its process id, reads one Order from its socket, forks the agent, and writes one Ended when all
  is over. It is our code and runs nothing of the user's. It ends the agent and every process that the agent has
  started: when the agent ends, and when the other side of the socket closes, so also when the trainer dies.
- The agent is the user's function, or a command.

`multiprocessing`'s forkserver would do for the first. It has no keeper, so what an agent starts would outlive it,
and its children import the trainer's main module.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import math
import os
import random
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import psutil

from tasks.machine.children import adopt_orphans, end_descendants, end_with_parent

GRACE_S = 2.0  # from SIGTERM to SIGKILL, in which an agent may stop a sandbox
OUTPUT_BYTES = 16 * 1024  # of an agent's output, its end
RESULT_BYTES = 64 * 1024
ROW_IN_ENV_BYTES = 128 * 1024 - 64  # Linux takes no longer variable (MAX_ARG_STRLEN)
ROW = "GRPO_ORCH_ROW"
SAID_MAX = 500  # characters of an error
REWARD_MAX = 1e15  # its square, added up over a batch, is a number in 32 bits, too
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Order:
    """One session's agent. `run`: a command; empty for the function that the host has imported."""

    base_url: str
    api_key: str
    row: dict[str, Any]
    seed: int
    workdir: str
    run: list[str] = field(default_factory=list)
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """How an agent ended.

    Args:
        reward: what it returned.
        why: it has no answer; empty where it has one, None included.
        output: the end of what it wrote to stdout and stderr.
    """

    reward: float | None = None
    why: str = ""
    output: str = ""


def main(control: int, import_path: str, open_files: int) -> None:
    """Serve until the trainer closes `control`, a socket's number.

    Args:
        import_path: the agent's; empty where agents are commands.
        open_files: that each process of an agent may have.
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    host = socket.socket(fileno=control)
    adopt_orphans()
    function, why = _load(import_path) if import_path else (None, "")
    host.sendall(msgspec.json.encode(why) + b"\n")
    if why:
        return
    keepers = {child.pid for child in psutil.Process().children()}  # and what the import has started
    signal.signal(signal.SIGCHLD, lambda *_: _reap(keepers))
    while True:
        _, descriptors, _, _ = socket.recv_fds(host, 1, 1)
        if not descriptors:  # the trainer is gone
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        with contextlib.suppress(OSError):  # no process is free: the trainer reads the end, and asks again
            pid = os.fork()
            if pid == 0:
                host.close()
                _keep(descriptors[0], function)
            keepers.add(pid)
        os.close(descriptors[0])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _load(import_path: str) -> tuple[Callable[..., Any] | None, str]:
    """The function, or why there is none."""
    module, _, name = import_path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except BaseException as error:  # noqa: BLE001  # a user's module may raise anything
        return None, _encodable(_named(error))
    return (found, "") if callable(found) else (None, "it is not a function")


def _reap(keepers: set[int]) -> None:
    """Collect ended children. What a killed keeper has left behind came to this process, and is ended."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = found
            if pid not in keepers or status != 0:  # with one that was left behind, what it had started comes here
                for left in psutil.Process().children():
                    if left.pid not in keepers:
                        _kill_tree(left)
            keepers.discard(pid)


def _kill_tree(top: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*top.children(recursive=True), top]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _keep(descriptor: int, function: Callable[..., Any] | None) -> NoReturn:
    """The keeper's whole life."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.setsid()
        os.set_inheritable(descriptor, False)
        trainer = socket.socket(fileno=descriptor)
        trainer.sendall(b"%d\n" % os.getpid())
        order = msgspec.json.decode(_read_line(trainer), type=Order)
        folder = tempfile.mkdtemp(prefix="agent-")
        try:
            ended = _Keeper(trainer, order, folder).run(function)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the trainer is gone
            trainer.sendall(msgspec.json.encode(ended) + b"\n")
        code = 0
    except BaseException:  # noqa: BLE001  # a forked process must not go on in its parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


def _read_line(trainer: socket.socket) -> bytes:
    data = bytearray()
    while not data.endswith(b"\n"):
        received = trainer.recv(_READ_BYTES)
        if not received:
            os._exit(0)
        data += received
    return bytes(data)


class _Keeper:
    """Runs one agent and ends what it has started."""

    def __init__(self, trainer: socket.socket, order: Order, folder: str) -> None:
        self._trainer, self._order, self._folder = trainer, order, folder
        self._output, self._result = bytearray(), bytearray()
        self._status: int | None = None

    def run(self, function: Callable[..., Any] | None) -> Ended:
        adopt_orphans()
        output, output_end = os.pipe()
        result, result_end = os.pipe()
        wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that a child's end wakes the loop
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        row = os.memfd_create("row")
        with open(row, "wb", closefd=False) as written:
            written.write(json.dumps(self._order.row).encode())
        agent = os.fork()
        if agent == 0:
            self._trainer.close()
            _become(self._order, function, self._folder, (row, output_end, result_end))
        for descriptor in (row, output_end, result_end):
            os.close(descriptor)
        told_to_end = self._watch(agent, output, result, wake)
        last = self._last_line(output)  # before those that are ended now write theirs
        end_descendants(GRACE_S)
        self._drain(output, self._output, OUTPUT_BYTES)
        self._drain(result, self._result, RESULT_BYTES)
        return self._ended(last, told_to_end=told_to_end)

    def _watch(self, agent: int, output: int, result: int, wake: int) -> bool:
        """Read what the agent writes until it ends, or the trainer wants it to; return whether it does."""
        open_ends, trainer = {output, result}, self._trainer.fileno()
        while True:
            ready, _, _ = select.select([trainer, wake, *open_ends], [], [])
            if trainer in ready:  # nothing is sent, so it is closed
                return True
            for end, kept, most in ((output, self._output, OUTPUT_BYTES), (result, self._result, RESULT_BYTES)):
                if end in ready and not _read_some(end, kept, most):
                    open_ends.discard(end)
            if wake in ready:
                os.read(wake, _READ_BYTES)
            with contextlib.suppress(ChildProcessError):
                while (found := os.waitpid(-1, os.WNOHANG))[0]:
                    if found[0] == agent:
                        self._status = found[1]
            if self._status is not None:
                return False

    def _last_line(self, output: int) -> str:
        os.set_blocking(output, False)
        with contextlib.suppress(BlockingIOError):  # once: a process that was left behind may write without end
            _read_some(output, self._output, OUTPUT_BYTES)
        return self._output.decode(errors="replace").strip().rpartition("\n")[2]

    def _drain(self, end: int, kept: bytearray, most: int) -> None:
        os.set_blocking(end, False)
        with contextlib.suppress(BlockingIOError):
            while _read_some(end, kept, most):
                pass

    def _ended(self, last: str, *, told_to_end: bool) -> Ended:
        output = self._output.decode(errors="replace")
        if told_to_end:
            return Ended(None, "it was ended", output)
        code = os.waitstatus_to_exitcode(self._status or 0)
        said = _rewarded(last) if self._order.run else _reported(self._result.decode(errors="replace"))
        if code == 0 and (said or self._order.run):
            return Ended(said.get("reward"), _encodable(str(said.get("why", "")))[:SAID_MAX], output)
        how, last = f"signal {-code}" if code < 0 else f"exit code {code}", last[:SAID_MAX]
        return Ended(None, f"it ended with {how}" + (f": {last}" if last else ""), output)


def _read_some(end: int, kept: bytearray, most: int) -> bool:
    """Read once and keep the last bytes; False at the end."""
    received = os.read(end, _READ_BYTES)
    kept += received
    del kept[:-most]
    return bool(received)


def _reported(line: str) -> dict[str, Any]:
    """What an agent's process has reported: a reward, or why there is none; empty where it is neither."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    if "reward" in found:
        return _checked(found["reward"])
    return {"why": found["why"]} if "why" in found else {}


def _rewarded(line: str) -> dict[str, Any]:
    """The same of a command's last line, which may be other JSON."""
    return _reported(line) if '"reward"' in line else {}


def _encodable(text: str) -> str:
    """Half of a surrogate pair, as JSON may hold one, is no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def _checked(reward: Any) -> dict[str, Any]:
    """A reward as one number or None, or what is wrong with it."""
    if reward is None:
        return {"reward": None}
    try:
        number = math.nan if isinstance(reward, str | bytes) else float(reward)
    except Exception:  # noqa: BLE001  # the user's object may raise anything
        number = math.nan
    if abs(number) <= REWARD_MAX:
        return {"reward": number}
    expected = f"a number up to {REWARD_MAX:g}" if math.isfinite(number) else "a finite number"
    return {"why": f"it returned {repr(reward)[: SAID_MAX // 2]}; expected {expected} or None"}


def _become(
    order: Order, function: Callable[..., Any] | None, folder: str, ends: tuple[int, int, int]
) -> NoReturn:
    """The agent's process. It does not return."""
    code, own = 1, os.getpid()
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with_parent()
        row, output, result = ends
        os.lseek(row, 0, os.SEEK_SET)
        for descriptor, target in ((row, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, target)
        sys.stdin, sys.stdout = open(0), open(1, "w", buffering=1)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115  # as Python's own
        _limit(order)
        os.chdir(order.workdir)
        os.environ |= _variables(order, folder)
        tempfile.tempdir = None
        if order.run:
            for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, which a program that is run inherits
                signal.signal(ignored, signal.SIG_DFL)
            os.execvp(order.run[0], order.run)
        assert function is not None
        reported = json.dumps(_called(function, order)).encode()
        if os.getpid() == own:  # a process that the agent forked comes no further than here
            os.write(result, reported)
            code = 0
    except Exception as error:  # noqa: BLE001  # whatever it is, the last line names it
        print(f"{order.run[0] if order.run else 'agent'}: {error}", file=sys.stderr)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _limit(order: Order) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if order.memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (order.memory_bytes, order.memory_bytes))
    with contextlib.suppress(OSError):  # where memory runs out, an agent goes before the trainer does
        Path("/proc/self/oom_score_adj").write_text("1000")


def _variables(order: Order, folder: str) -> dict[str, str]:
    row = json.dumps(order.row)
    named = {"OPENAI_BASE_URL": order.base_url, "OPENAI_API_KEY": order.api_key, "TMPDIR": folder}
    return named | ({ROW: row} if len(row) < ROW_IN_ENV_BYTES else {})


def _called(function: Callable[..., Any], order: Order) -> dict[str, Any]:
    """Call the user's function, with random numbers that are the same when the session is made again."""
    random.seed(order.seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(order.seed % 2**32)
    try:
        found = function(order.base_url, order.api_key, order.row)
        return _checked(asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found)
    except MemoryError:
        return {"why": "MemoryError: it took more memory than trainer.agent.memory_gb"}
    except BaseException as error:  # noqa: BLE001  # a user's function may raise anything
        with contextlib.suppress(Exception):  # the agent may have closed stderr
            traceback.print_exc()
        return {"why": _named(error)}


def _named(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:SAID_MAX]
    except Exception:  # noqa: BLE001  # a user's `__str__`
        return type(error).__name__


async def _awaited(found: Any) -> Any:
    return await found
