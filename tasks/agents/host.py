"""Run each agent in its own process, forked in milliseconds from a host that has imported the agent.

Three kinds of process, all started by `tasks.agents.processes` in the trainer:

- The host imports the agent's module once. It forks a keeper for each socket that it receives.
- A keeper writes its process id, reads one AgentTask from its socket, forks the agent, and writes one AgentResult.
  It runs only our code. It terminates the agent and every process that the agent started when the agent ends, and
  when the other side of the socket closes, which includes the death of the trainer.
- The agent is the user's function or a command.

`multiprocessing`'s forkserver could replace the host. But it has no keeper, so an agent's child processes would
outlive it, and its children import the trainer's main module.
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

from grpo_orch.tasks.machine.children import adopt_orphans, end_descendants, end_with_parent

GRACE_S = 2.0  # from SIGTERM to SIGKILL, so that an agent can stop a sandbox
OUTPUT_BYTES = 16 * 1024  # kept from the end of an agent's output
RESULT_BYTES = 64 * 1024
ROW_IN_ENV_BYTES = 128 * 1024 - 64  # Linux limits a variable's length (MAX_ARG_STRLEN)
ROW = "GRPO_ORCH_ROW"
ERROR_CHARS = 500  # characters of an error message
REWARD_MAX = 1e15  # the sum of its squares over a batch still fits a 32-bit float
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class AgentTask:
    """Describes one session's agent. `run` is a command; empty for the function that the host imported."""

    base_url: str
    api_key: str
    row: dict[str, Any]
    seed: int
    workdir: str
    run: list[str] = field(default_factory=list)
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class AgentResult:
    """How an agent ended.

    Args:
        reward: the reward it returned.
        reason: reason for a missing result; empty if it returned one, including None.
        output: the end of its stdout and stderr.
    """

    reward: float | None = None
    reason: str = ""
    output: str = ""


def main(control: int, import_path: str, open_files: int) -> None:
    """Serve until the trainer closes the socket.

    Args:
        control: file descriptor of the socket.
        import_path: of the agent; empty if agents are commands.
        open_files: open file limit of each process of an agent.
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    host = socket.socket(fileno=control)
    adopt_orphans()
    function, why = _load(import_path) if import_path else (None, "")
    host.sendall(msgspec.json.encode(why) + b"\n")
    if why:
        return
    keepers = {child.pid for child in psutil.Process().children()}  # and processes that the import started
    signal.signal(signal.SIGCHLD, lambda *_: _reap(keepers))
    while True:
        _, descriptors, _, _ = socket.recv_fds(host, 1, 1)
        if not descriptors:  # the trainer is gone
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        with contextlib.suppress(OSError):  # process limit reached: the trainer reads EOF and retries
            pid = os.fork()
            if pid == 0:
                host.close()
                _keep(descriptors[0], function)
            keepers.add(pid)
        os.close(descriptors[0])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _load(import_path: str) -> tuple[Callable[..., Any] | None, str]:
    """Return the function, or the reason why it cannot be loaded."""
    module, _, name = import_path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except BaseException as error:  # noqa: BLE001  # a user's module may raise anything
        return None, _escape_surrogates(f"{type(error).__name__}: {error}"[:ERROR_CHARS])
    return (function, "") if callable(function) else (None, "it is not a function")


def _reap(keepers: set[int]) -> None:
    """Reap ended children, and kill processes that this one inherited from killed keepers."""
    with contextlib.suppress(ChildProcessError):
        while (waited := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = waited
            if pid not in keepers or status != 0:  # when an orphan ends, this process inherits its children
                for child in psutil.Process().children():
                    if child.pid not in keepers:
                        _kill_tree(child)
            keepers.discard(pid)


def _kill_tree(top: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*top.children(recursive=True), top]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _keep(descriptor: int, function: Callable[..., Any] | None) -> NoReturn:
    """Run the keeper and exit."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.setsid()
        os.set_inheritable(descriptor, False)
        trainer = socket.socket(fileno=descriptor)
        trainer.sendall(b"%d\n" % os.getpid())
        order = msgspec.json.decode(_read_line(trainer), type=AgentTask)
        folder = tempfile.mkdtemp(prefix="agent-")
        try:
            ended = _Keeper(trainer, order, folder).run(function)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the trainer is gone
            trainer.sendall(msgspec.json.encode(ended) + b"\n")
        code = 0
    except BaseException:  # noqa: BLE001  # a forked process must not return into its parent's code
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
    """Runs one agent and terminates the processes that it started."""

    def __init__(self, trainer: socket.socket, order: AgentTask, folder: str) -> None:
        self._trainer, self._order, self._folder = trainer, order, folder
        self._output, self._result = bytearray(), bytearray()
        self._status: int | None = None

    def run(self, function: Callable[..., Any] | None) -> AgentResult:
        adopt_orphans()
        output, output_end = os.pipe()
        result, result_end = os.pipe()
        wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the end of a child wakes the loop
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        row = os.memfd_create("row")
        with open(row, "wb", closefd=False) as file:
            file.write(json.dumps(self._order.row).encode())
        agent = os.fork()
        if agent == 0:
            self._trainer.close()
            _run_agent(self._order, function, self._folder, (row, output_end, result_end))
        for descriptor in (row, output_end, result_end):
            os.close(descriptor)
        was_stopped = self._watch(agent, output, result, wake)
        last = self._last_line(output)  # before processes that are terminated now write to it
        end_descendants(GRACE_S)
        self._drain(output, self._output, OUTPUT_BYTES)
        self._drain(result, self._result, RESULT_BYTES)
        return self._ended(last, was_stopped=was_stopped)

    def _watch(self, agent: int, output: int, result: int, wake: int) -> bool:
        """Read the agent's output until it ends or the trainer stops it; return whether the trainer did."""
        open_pipes, trainer = {output, result}, self._trainer.fileno()
        while True:
            ready, _, _ = select.select([trainer, wake, *open_pipes], [], [])
            if trainer in ready:  # the trainer sends nothing more, so it closed the socket
                return True
            pipes = ((output, self._output, OUTPUT_BYTES), (result, self._result, RESULT_BYTES))
            for end, buffer, max_bytes in pipes:
                if end in ready and not _read_some(end, buffer, max_bytes):
                    open_pipes.discard(end)
            if wake in ready:
                os.read(wake, _READ_BYTES)
            with contextlib.suppress(ChildProcessError):
                while (waited := os.waitpid(-1, os.WNOHANG))[0]:
                    if waited[0] == agent:
                        self._status = waited[1]
            if self._status is not None:
                return False

    def _last_line(self, output: int) -> str:
        os.set_blocking(output, False)
        with contextlib.suppress(BlockingIOError):  # read once: an orphaned process may write forever
            _read_some(output, self._output, OUTPUT_BYTES)
        return self._output.decode(errors="replace").strip().rpartition("\n")[2]

    def _drain(self, end: int, buffer: bytearray, max_bytes: int) -> None:
        os.set_blocking(end, False)
        with contextlib.suppress(BlockingIOError):
            while _read_some(end, buffer, max_bytes):
                pass

    def _ended(self, last: str, *, was_stopped: bool) -> AgentResult:
        output = self._output.decode(errors="replace")
        if was_stopped:
            return AgentResult(None, "it was ended", output)
        code = os.waitstatus_to_exitcode(self._status or 0)
        if self._order.run:  # the last line may be unrelated JSON
            report = _parse_report(last) if '"reward"' in last else {}
        else:
            report = _parse_report(self._result.decode(errors="replace"))
        if code == 0 and (report or self._order.run):
            return AgentResult(
                report.get("reward"), _escape_surrogates(str(report.get("why", "")))[:ERROR_CHARS], output
            )
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        last = last[:ERROR_CHARS]
        return AgentResult(None, f"it ended with {how}" + (f": {last}" if last else ""), output)


def _read_some(end: int, buffer: bytearray, max_bytes: int) -> bool:
    """Read once and keep the last `max_bytes` in `buffer`. Return False at the end of the pipe."""
    received = os.read(end, _READ_BYTES)
    buffer += received
    del buffer[:-max_bytes]
    return bool(received)


def _parse_report(line: str) -> dict[str, Any]:
    """Parse an agent's report: a reward, or the reason for a missing one. Return {} if `line` is neither."""
    try:
        report = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(report, dict):
        return {}
    if "reward" in report:
        return _check_reward(report["reward"])
    return {"why": report["why"]} if "why" in report else {}


def _escape_surrogates(text: str) -> str:
    """Escape lone surrogates, which JSON may contain but UTF-8 cannot encode."""
    return text.encode(errors="backslashreplace").decode()


def _check_reward(reward: Any) -> dict[str, Any]:
    """Return the reward as a number or None, or the reason why it is invalid."""
    if reward is None:
        return {"reward": None}
    try:
        number = math.nan if isinstance(reward, str | bytes) else float(reward)
    except Exception:  # noqa: BLE001  # the user's object may raise anything
        number = math.nan
    if abs(number) <= REWARD_MAX:
        return {"reward": number}
    expected = f"a number up to {REWARD_MAX:g}" if math.isfinite(number) else "a finite number"
    return {"why": f"it returned {repr(reward)[: ERROR_CHARS // 2]}; expected {expected} or None"}


def _run_agent(
    order: AgentTask, function: Callable[..., Any] | None, folder: str, ends: tuple[int, int, int]
) -> NoReturn:
    """Turn this forked process into the agent. It does not return."""
    code, agent_pid = 1, os.getpid()
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with_parent()
        row, output, result = ends
        os.lseek(row, 0, os.SEEK_SET)
        for descriptor, target in ((row, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, target)
        sys.stdin, sys.stdout = open(0), open(1, "w", buffering=1)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115  # as in Python's default
        _limit(order)
        os.chdir(order.workdir)
        os.environ |= _variables(order, folder)
        tempfile.tempdir = None
        if order.run:
            for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python; exec would inherit that
                signal.signal(ignored, signal.SIG_DFL)
            os.execvp(order.run[0], order.run)
        assert function is not None
        report = json.dumps(_call(function, order)).encode()
        if os.getpid() == agent_pid:  # a process that the agent forked must not report
            os.write(result, report)
            code = 0
    except Exception as error:  # noqa: BLE001  # the last line of the output names any error
        print(f"{order.run[0] if order.run else 'agent'}: {error}", file=sys.stderr)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _limit(order: AgentTask) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if order.memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (order.memory_bytes, order.memory_bytes))
    with contextlib.suppress(OSError):  # out of memory, the kernel kills agents before the trainer
        Path("/proc/self/oom_score_adj").write_text("1000")


def _variables(order: AgentTask, folder: str) -> dict[str, str]:
    row = json.dumps(order.row)
    variables = {"OPENAI_BASE_URL": order.base_url, "OPENAI_API_KEY": order.api_key, "TMPDIR": folder}
    return variables | ({ROW: row} if len(row) < ROW_IN_ENV_BYTES else {})


def _call(function: Callable[..., Any], order: AgentTask) -> dict[str, Any]:
    """Call the user's function. Seed the random numbers so that a rerun of the session repeats them."""
    random.seed(order.seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(order.seed % 2**32)
    try:
        result = function(order.base_url, order.api_key, order.row)
        return _check_reward(asyncio.run(_await(result)) if inspect.isawaitable(result) else result)
    except MemoryError:
        return {"why": "MemoryError: it took more memory than trainer.agent.memory_gb"}
    except BaseException as error:  # noqa: BLE001  # a user's function may raise anything
        traceback.print_exc()
        return {"why": f"{type(error).__name__}: {error}"}


async def _await(result: Any) -> Any:
    return await result
