"""Calls of SkyPilot and its API server with deadlines and our errors. Imports no SkyPilot.

SkyPilot's waiting for the API server has no timeout, so it runs in a thread that may be abandoned. The request is
then cancelled, even if it is submitted only after the deadline.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from shlex import quote
from typing import Any, Generic, TypeVar

import psutil

from grpo_orch.orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from grpo_orch.orchestrator.clouds.sky.errors import COLOUR, HAS_LOG, Failure, classify, one_line

Result = TypeVar("Result")

# One launch tries zone after zone and sets the machine up. After a timeout the next launch of the same name
# continues.
LAUNCH_TIMEOUT_S = 1800.0
CALL_TIMEOUT_S = 300.0  # other calls that wait for machines
CANCEL_TIMEOUT_S = 5.0
FIND_TIMEOUT_S = 60.0


def restore_tracebacks() -> None:
    """Restore tracebacks: before it raises, SkyPilot sets their limit to 0 for the whole process."""
    vars(sys).pop("tracebacklimit", None)


class Call(threading.Thread, Generic[Result]):
    """A call with a deadline. `submit` returns the request id that `fetch` waits for and `cancel` cancels."""

    def __init__(
        self, submit: Callable[[], str], fetch: Callable[[str], Result], cancel: Callable[[str], object]
    ) -> None:
        super().__init__(name="skypilot-call", daemon=True)
        self._submit, self._fetch, self._cancel = submit, fetch, cancel
        self._abandoned = threading.Event()
        self._result: list[Result] = []
        self._error: Exception | None = None
        self.id: str | None = None

    def run(self) -> None:
        """Submit the request and keep its result."""
        try:
            self.id = self._submit()
            if self._abandoned.is_set():
                self._cancel(self.id)
            else:
                self._result.append(self._fetch(self.id))
        except Exception as error:  # noqa: BLE001 the caller raises it
            self._error = error
        finally:
            restore_tracebacks()

    def result(self, timeout_s: float) -> Result:
        """Make the call. Raises TimeoutError at the deadline, and the call's own error."""
        self.start()
        self.join(max(0.0, timeout_s))
        if self.is_alive():
            self._abandon()
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _abandon(self) -> None:
        self._abandoned.set()
        if (submitted := self.id) is not None:
            canceller = threading.Thread(target=self._try_cancel, args=(submitted,), daemon=True)
            canceller.start()
            canceller.join(CANCEL_TIMEOUT_S)

    def _try_cancel(self, submitted: str) -> None:
        # A request that cannot be cancelled continues; the next call finds its result in SkyPilot's records.
        with contextlib.suppress(Exception):
            self._cancel(submitted)


def call_cloud(function: Callable[[], Result], timeout_s: float) -> Result:
    """Call a function that queries clouds or catalogs from this process. Raises CloudRefused, CloudUnavailable."""
    call = Call(lambda: "", lambda _: function(), lambda _: None)
    try:
        return call.result(timeout_s)
    except TimeoutError:
        raise CloudUnavailable(f"a cloud did not answer within {timeout_s:g} s; try again") from None
    except (CloudRefused, CloudUnavailable):
        raise
    except Exception as error:
        raise classify(failure_of(error)) from error


def query_cloud(function: Callable[[], Result]) -> Result:
    """Call a function that queries a cloud and requests no machine. Raises CloudUnavailable."""
    with refusals_as_unavailable():
        return call_cloud(function, FIND_TIMEOUT_S)


@contextlib.contextmanager
def refusals_as_unavailable() -> Iterator[None]:
    """Raise CloudUnavailable instead of CloudRefused, for calls that request no machine."""
    try:
        yield
    except CloudRefused as refused:
        raise CloudUnavailable(str(refused)) from refused


def failure_of(error: Exception, log: str = "") -> Failure:
    """Describe an error; `log` is the request's."""
    history = tuple((type(cause).__name__, str(cause)) for cause in getattr(error, "failover_history", ()))
    return Failure(type(error).__name__, str(error), history, log)


# Log lines, while a call writes them. SkyPilot's own iterator hides the error of a missing log; the writing call
# raises it.

_END = None


class _Sink(io.TextIOBase):
    """A stream that queues the written lines."""

    def __init__(self) -> None:
        self.lines: SimpleQueue[str | None] = SimpleQueue()
        self.error: Exception | None = None

    def write(self, text: str) -> int:
        if text:
            self.lines.put(COLOUR.sub("", text).rstrip())
        return len(text)


def lines_from(name: str, call: Callable[[io.TextIOBase], object]) -> Iterator[str]:
    """Yield the log lines of cluster `name` without colours, as `call` writes them.

    Raises CloudUnavailable after the last line if the call fails.
    """
    sink = _Sink()

    def write() -> None:
        try:
            call(sink)
        except Exception as error:  # noqa: BLE001 the reader raises it
            sink.error = error
        finally:
            restore_tracebacks()
            sink.lines.put(_END)

    # The call may wait for more lines forever; then the thread is abandoned.
    threading.Thread(target=write, name="skypilot-log", daemon=True).start()
    yield from iter(sink.lines.get, _END)
    if sink.error is not None:
        raise CloudUnavailable(f"cannot read the log of {name}: {one_line(str(sink.error))}") from sink.error


# Requests to the API server, and the server itself.

LOG_TIMEOUT_S = 60.0
LOG_LINES = 400


class Requests:
    """Requests to the API server.

    Args:
        sdk: `sky.client.sdk`.
        server: `sky.server.common`.
        log: returns the log file of a local server.
    """

    def __init__(self, sdk: Any, server: Any, log: Callable[[], Path]) -> None:
        self._sdk = sdk
        self._server = server
        self._log = log
        self._starting = threading.Lock()

    def perform(self, submit: Callable[[], str], timeout_s: float) -> Any:
        """Submit a request and return its result. Raises CloudRefused, CloudUnavailable."""

        def ensure_server_and_submit() -> str:
            self.ensure_server()
            return submit()

        call = Call(
            ensure_server_and_submit, self._sdk.get, lambda request: self._sdk.api_cancel([request], silent=True)
        )
        try:
            return call.result(timeout_s)
        except TimeoutError:
            message = (
                f"SkyPilot did not complete the request within {timeout_s:g} s; retrying, see `sky api status`"
            )
            raise CloudUnavailable(message) from None
        except CloudUnavailable:
            raise
        except Exception as error:
            self._server.get_api_server_status_response.cache_clear()  # the server may be gone
            log = self._log_of(call.id) if type(error).__name__ == HAS_LOG and call.id else ""
            raise classify(failure_of(error, log)) from error

    def query(self, submit: Callable[[], str], timeout_s: float) -> Any:
        """Submit a request for no machine and return its result. Raises CloudUnavailable."""
        with refusals_as_unavailable():
            return self.perform(submit, timeout_s)

    def ensure_server(self) -> None:
        """Ensure that the API server answers; start a local one if needed. Raises CloudUnavailable."""
        server = self._server
        status = server.get_api_server_status().status
        if status is server.ApiServerStatus.HEALTHY:
            return
        server.get_api_server_status_response.cache_clear()  # the next call queries the server again
        url = server.redact_url_password(server.get_server_url())
        if status is server.ApiServerStatus.NEEDS_AUTH:
            message = f"SkyPilot's API server at {url} requires a login; run `sky api login -e {quote(url)}`"
            raise CloudUnavailable(message)
        if status is server.ApiServerStatus.VERSION_MISMATCH:
            message = f"SkyPilot's API server at {url} has another version; run `sky api stop`, or upgrade it"
            raise CloudUnavailable(message)
        if not server.is_api_server_local():
            check = f"curl {quote(f'{url}/api/health')}"
            raise CloudUnavailable(f"SkyPilot's API server at {url} does not answer; check it with `{check}`")
        with self._starting:
            if server.get_api_server_status().status is not server.ApiServerStatus.HEALTHY:
                start_server(self._log())
                server.get_api_server_status_response.cache_clear()

    def _log_of(self, request: str) -> str:
        """Return the end of a request's log, the only place with the cloud's message of a refusal."""
        text = io.StringIO()

        def stream() -> None:
            self._sdk.stream_and_get(request, tail=LOG_LINES, follow=False, output_stream=text)

        try:
            Call(lambda: "", lambda _: stream(), lambda _: None).result(LOG_TIMEOUT_S)
        except Exception:  # noqa: BLE001 without the log the error message is only less exact
            return ""
        return text.getvalue()


# Starting a SkyPilot API server on this machine, after killing the orphans of a dead one. The server leads its own
# session. Its executors survive it: they ignore SIGTERM, hold port 50011, which a new server needs, and continue
# their launch. Killing them is safe: SkyPilot's records have what they created, and launching the same name again
# continues it.
START_TIMEOUT_S = 120.0


def start_server(log: Path) -> None:
    """Start an API server that logs to `log` and outlives this process. Raises CloudUnavailable."""
    kill_orphans(log.parent)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPO_ORCH_")}
    command = [sys.executable, "-P", "-c", "import sky; sky.api_start()"]
    try:
        started = subprocess.run(
            command,
            env=environment,
            cwd=Path.home(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=START_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        message = f"SkyPilot's API server did not start within {START_TIMEOUT_S:g} s; see {log}"
        raise CloudUnavailable(message) from None
    if started.returncode:
        raise CloudUnavailable(f"SkyPilot's API server did not start; see {log}, then run `sky api stop`")


def kill_orphans(state: Path) -> list[int]:
    """SIGKILL the orphans of a dead API server whose files are below `state`. Return their pids; empty on macOS.

    A process is an orphan if the leader of its session is dead and it has a file below `state` open, or if an
    orphan started it. A session from outside this container has number 0; its leader is unknown.
    """
    killed = []
    while pids := [pid for pid in _orphans(state.resolve()) if pid not in killed]:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        killed += pids
    return killed


def _orphans(state: Path) -> list[int]:
    processes = psutil.process_iter(["ppid"])
    parents = {process.pid: process.info["ppid"] for process in processes if _has_lost_its_leader(process.pid)}
    found = [pid for pid in parents if _has_open_below(pid, state)]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid and child not in found]
    return found


def _has_lost_its_leader(pid: int) -> bool:
    """Whether a process is alive and the leader of its session is dead."""
    try:
        session = os.getsid(pid)
    except OSError:
        return False
    return session != 0 and _is_alive(pid) and not _is_alive(session)


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _has_open_below(pid: int, folder: Path) -> bool:
    """Whether the process has a file below `folder` open, including deleted files, which psutil omits."""
    try:
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False  # the process has ended or belongs to another user
    return any(link.startswith(f"{folder}/") for link in links)
