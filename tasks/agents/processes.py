"""Start the agent host (`tasks.agents.host`) from the trainer and run agents through it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from grpo_orch.tasks.agents.host import GRACE_S, AgentResult, AgentTask
from grpo_orch.tasks.machine.launching import without_ranks

log = structlog.get_logger()

STARTS = 3  # attempts to start a session's keeper
RETRY_S = 1.0  # between two attempts
START_S = 300.0  # limit for importing the agent's module, which is slow on a busy machine
END_S = GRACE_S + 30.0  # limit for a keeper to terminate its agent's processes
ANSWER_BYTES = 1 << 20
BOOTSTRAP = (
    "import json, sys; first, last = json.loads(sys.argv[1]); "
    "sys.path[:] = [*first, *filter(None, sys.path), *last]; from grpo_orch.tasks.agents.host import main"
)
PACKAGE_ROOT = Path(__file__).parents[3]
HIDDEN_PREFIX = "GRPO_ORCH_"  # of variables that agents must not see, such as the run's token


class AgentStartError(Exception):
    """Raised when the agent cannot be started; the message gives the reason."""


class AgentHost:
    """Runs sessions' agents.

    Args:
        run: an import path or a command.
        workdir: the folder of run.yaml, in which agents run.
        memory_bytes: address space limit of each process of an agent; None: unlimited.
        python: interpreter that imports the agent, relative to `workdir`; it needs msgspec and psutil. None: the
            trainer's.
        fork_s: limit for the host to fork a session's keeper.
        end_s: limit for a keeper to terminate its agent's processes.
        again_s: between two attempts to start a session's keeper.
    """

    def __init__(
        self,
        run: str | Sequence[str],
        workdir: Path,
        memory_bytes: int | None = None,
        python: str | None = None,
        *,
        fork_s: float = START_S,
        end_s: float = END_S,
        again_s: float = RETRY_S,
    ) -> None:
        self._path, self._command = (run, []) if isinstance(run, str) else ("", list(run))
        self._workdir, self._memory_bytes, self._python = workdir, memory_bytes, python
        self.fork_s, self._end_s, self._again_s = fork_s, end_s, again_s
        self._control: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None  # the host, if it was started
        self._lock = threading.Lock()
        # Agents keep the original limit: some programs close every possible file descriptor.
        self._open_files, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Each session holds a socket here, and two more for each request.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))

    def start(self) -> None:
        """Start the host unless it is running. Raises AgentStartError."""
        with self._lock:
            if self.process is not None and self.process.poll() is None:
                return
            self._close()
            self._control, theirs = socket.socketpair()
            with theirs:
                try:
                    self.process = _start(theirs, self._path, self._workdir, self._python, self._open_files)
                except OSError as error:
                    self._close()
                    raise AgentStartError(f"its interpreter does not start: {error}") from error
            self._control.settimeout(START_S)
            why = self._first_line(self._control)
            if why:
                self._close()
                raise AgentStartError(why)
            self._control.settimeout(None)

    def close(self) -> None:
        """Kill the host. Agents keep running until their sessions end."""
        with self._lock:
            self._close()

    async def run(
        self,
        base_url: str,
        api_key: str,
        row: dict[str, Any],
        seed: int,
        stop: asyncio.Event,
        began: Callable[[], None] = lambda: None,
    ) -> AgentResult:
        """Run a session's agent and return how it ended. Raises AgentStartError.

        Setting `stop` or cancelling the call terminates the agent and every process that it started.

        Args:
            began: called once the agent has a process.
        """
        order = AgentTask(base_url, api_key, row, seed, str(self._workdir), self._command, self._memory_bytes)
        why = "its host ended"
        for _ in range(STARTS):
            try:
                ours = await asyncio.to_thread(self.fork)
            except OSError as error:  # the process or file limit is reached
                why = str(error)
                await asyncio.sleep(self._again_s)
                continue
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=ANSWER_BYTES)
            try:
                if keeper := await asyncio.wait_for(_read_line(reader), self.fork_s):
                    began()
                    writer.write(msgspec.json.encode(order) + b"\n")
                    return await self._wait_for_end(reader, writer, int(keeper), stop)
            except TimeoutError:  # an agent suspended the host
                await asyncio.to_thread(self.close)
            finally:
                writer.close()
            await asyncio.sleep(self._again_s)  # an agent killed the host, or the process limit is reached
        return AgentResult(None, f"no process could be started for it: {why}")

    async def _wait_for_end(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keeper: int, stop: asyncio.Event
    ) -> AgentResult:
        """Return what the keeper reports once its agent has ended, or was terminated because of `stop`."""
        answer = asyncio.ensure_future(_read_line(reader))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait([answer, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                writer.write_eof()
                await asyncio.wait([answer], timeout=self._end_s)
            if not answer.done():  # the agent suspended its keeper, and dies with it
                with contextlib.suppress(ProcessLookupError):
                    os.kill(keeper, signal.SIGKILL)
            elif answer.result():
                return msgspec.json.decode(answer.result(), type=AgentResult)
        finally:
            answer.cancel()
            stopping.cancel()
        return AgentResult(None, "its process was killed")

    def fork(self) -> socket.socket:
        """Have the host fork a keeper and return the socket to it. Raises AgentStartError, OSError."""
        for _ in range(2):
            self.start()
            ours, theirs = socket.socketpair()
            with theirs, self._lock:
                try:
                    assert self._control is not None
                    socket.send_fds(self._control, [b"s"], [theirs.fileno()])
                except (OSError, AssertionError):  # an agent killed the host
                    ours.close()
                    self._close()
                    continue
            ours.setblocking(False)
            return ours
        raise AgentStartError("its host does not stay alive")

    def _first_line(self, control: socket.socket) -> str:
        data = b""
        try:
            while not data.endswith(b"\n"):
                received = control.recv(1 << 16)
                if not received:
                    return "the process that imports it ended"
                data += received
        except TimeoutError:
            return f"importing it took longer than {START_S:g} s"
        return msgspec.json.decode(data, type=str)

    def _close(self) -> None:
        if self._control is not None:
            self._control.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self._control = self.process = None


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """Return a complete line, or nothing at the end of the stream."""
    try:
        line = await reader.readline()
    except (OSError, ValueError):
        return b""
    return line if line.endswith(b"\n") else b""


def _start(
    control: socket.socket, import_path: str, workdir: Path, python: str | None, open_files: int
) -> subprocess.Popen[bytes]:
    """Start the host. Raises OSError.

    The module search path is an argument, not PYTHONPATH, because a command may run Python of another environment.
    """
    if python is None:
        interpreter, first, last = sys.executable, [str(workdir), *filter(None, sys.path)], os.getcwd()
    else:  # its own packages come first; ours only provide `tasks.agents`
        interpreter, first, last = _program(python, workdir), [str(workdir)], str(PACKAGE_ROOT)
    env = {name: value for name, value in without_ranks(os.environ).items() if not name.startswith(HIDDEN_PREFIX)}
    code = f"{BOOTSTRAP}; main({control.fileno()}, {import_path!r}, {open_files})"
    return subprocess.Popen(
        [interpreter, "-c", code, json.dumps([first, [last]])],
        env={**env, "PYTHONHASHSEED": "0"},
        stdin=subprocess.DEVNULL,
        pass_fds=[control.fileno()],
        start_new_session=True,
    )


def _program(name: str, workdir: Path) -> str:
    """Return the program's path as a shell in `workdir` resolves it."""
    return str(workdir / name) if "/" in name else name
