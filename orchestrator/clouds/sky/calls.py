"""Calls of SkyPilot and its API server: with a deadline for the caller, and our errors. Imports no SkyPilot.

Waiting for the API server has no timeout of its own, so it is done in a thread that may be abandoned. The
request is then cancelled, even if it is submitted only after the deadline.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from shlex import quote
from typing import Any, Generic, TypeVar

import psutil
import structlog

from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from orchestrator.clouds.sky.errors import COLOUR, HAS_LOG, Failure, one_line, understand

log = structlog.get_logger()
Result = TypeVar("Result")

# SkyPilot tries zone after zone within one launch, and sets the machine up; a launch that is cut off here goes on
# where it was, for the next one has the same name.
LAUNCH_TIMEOUT_S = 1800.0
CALL_TIMEOUT_S = 300.0  # any other that waits for machines
CANCEL_TIMEOUT_S = 5.0
FIND_TIMEOUT_S = 60.0
LOGGED_FROM_S = 0.1  # shorter calls are not in the log


@contextlib.contextmanager
def timed(call: str, cluster: str) -> Iterator[None]:
    """Log how long the call inside took, however it ended, unless it was short."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        if (seconds := time.monotonic() - began_s) >= LOGGED_FROM_S:
            log.info("skypilot_called", call=call, cluster=cluster, seconds=round(seconds, 2))


def restore_tracebacks() -> None:
    """Undo what SkyPilot does before it raises: it limits them to nothing, for the whole process."""
    vars(sys).pop("tracebacklimit", None)


class Call(threading.Thread, Generic[Result]):
    """`submit` returns the id that `fetch` waits for and `cancel` calls off."""

    def __init__(
        self, submit: Callable[[], str], fetch: Callable[[str], Result], cancel: Callable[[str], object]
    ) -> None:
        super().__init__(name="skypilot-call", daemon=True)
        self._submit, self._fetch, self._cancel = submit, fetch, cancel
        self._given_up = threading.Event()
        self._result: list[Result] = []
        self._error: Exception | None = None
        self.id: str | None = None

    def run(self) -> None:
        """Submit, wait, keep what came."""
        try:
            self.id = self._submit()
            if self._given_up.is_set():
                self._cancel(self.id)
            else:
                self._result.append(self._fetch(self.id))
        except Exception as error:  # noqa: BLE001 the caller raises it
            self._error = error
        finally:
            restore_tracebacks()

    def result(self, timeout_s: float) -> Result:
        """Make the call. Raises TimeoutError at the deadline, and whatever the call raised."""
        self.start()
        self.join(max(0.0, timeout_s))
        if self.is_alive():
            self._give_up()
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _give_up(self) -> None:
        self._given_up.set()
        if (submitted := self.id) is not None:
            canceller = threading.Thread(target=self._try_cancel, args=(submitted,), daemon=True)
            canceller.start()
            canceller.join(CANCEL_TIMEOUT_S)

    def _try_cancel(self, submitted: str) -> None:
        # What cannot be cancelled goes on; its result is on record, where the next call finds it.
        with contextlib.suppress(Exception):
            self._cancel(submitted)


def ask_cloud(function: Callable[[], Result], timeout_s: float) -> Result:
    """Call what asks clouds and catalogs from this process. Raises CloudRefused, CloudUnavailable."""
    call = Call(lambda: "", lambda _: function(), lambda _: None)
    try:
        return call.result(timeout_s)
    except TimeoutError:
        raise CloudUnavailable(f"a cloud has not answered within {timeout_s:g} s; try again") from None
    except (CloudRefused, CloudUnavailable):
        raise
    except Exception as error:
        raise understand(failure_of(error)) from error


def find_out(function: Callable[[], Result]) -> Result:
    """Call what asks a cloud for no machine, so that nothing is refused. Raises CloudUnavailable."""
    with nothing_refused():
        return ask_cloud(function, FIND_TIMEOUT_S)


@contextlib.contextmanager
def nothing_refused() -> Iterator[None]:
    """Where no machine is asked for, a refusal is no answer: it is raised as CloudUnavailable."""
    try:
        yield
    except CloudRefused as refused:
        raise CloudUnavailable(str(refused)) from refused


def failure_of(error: Exception, log: str = "") -> Failure:
    """What is known of a failure; `log` is the request's."""
    history = tuple((type(one).__name__, str(one)) for one in getattr(error, "failover_history", ()))
    return Failure(type(error).__name__, str(error), history, log)


# A log as lines, while a call writes it. SkyPilot can yield lines itself, but reports nothing then when there is
# no log: the reason comes with the end of the call that writes.

_END = None


class _Sink(io.TextIOBase):
    """Where the call writes, line by line."""

    def __init__(self) -> None:
        self.lines: SimpleQueue[str | None] = SimpleQueue()
        self.error: Exception | None = None

    def write(self, text: str) -> int:
        if text:
            self.lines.put(COLOUR.sub("", text).rstrip())
        return len(text)


def lines_from(name: str, call: Callable[[io.TextIOBase], object]) -> Iterator[str]:
    """Lines of the log of cluster `name`, without colours, as `call` writes them.

    Raises CloudUnavailable, after what has been written, when the call fails.
    """
    sink = _Sink()

    def write() -> None:
        try:
            call(sink)
        except Exception as error:  # noqa: BLE001 whoever reads the lines raises it
            sink.error = error
        finally:
            restore_tracebacks()
            sink.lines.put(_END)

    # It may wait for more for ever, and is abandoned then.
    threading.Thread(target=write, name="skypilot-log", daemon=True).start()
    yield from iter(sink.lines.get, _END)
    if sink.error is not None:
        raise CloudUnavailable(f"the log of {name} broke off: {one_line(str(sink.error))}") from sink.error


# Requests to the API server, and the server itself.

LOG_TIMEOUT_S = 60.0
LOG_LINES = 400


class Requests:
    """`sdk`: `sky.client.sdk`; `server`: `sky.server.common`; `log`: returns where a server of our own logs to."""

    def __init__(self, sdk: Any, server: Any, log: Callable[[], Path]) -> None:
        self._sdk = sdk
        self._server = server
        self._log = log
        self._starting = threading.Lock()

    def ask(self, submit: Callable[[], str], timeout_s: float) -> Any:
        """Have a request done. Raises CloudRefused, CloudUnavailable."""

        def see_server_and_submit() -> str:
            self.see_server()
            return submit()

        call = Call(
            see_server_and_submit, self._sdk.get, lambda request: self._sdk.api_cancel([request], silent=True)
        )
        try:
            return call.result(timeout_s)
        except TimeoutError:
            late = f"SkyPilot has not done it within {timeout_s:g} s; it is tried again, see `sky api status`"
            raise CloudUnavailable(late) from None
        except CloudUnavailable:
            raise
        except Exception as error:
            self._server.get_api_server_status_response.cache_clear()  # it may be the server that is gone
            log = self._log_of(call.id) if type(error).__name__ == HAS_LOG and call.id else ""
            raise understand(failure_of(error, log)) from error

    def look(self, submit: Callable[[], str], timeout_s: float) -> Any:
        """Have a request done that gives no machine, so that nothing is refused. Raises CloudUnavailable."""
        with nothing_refused():
            return self.ask(submit, timeout_s)

    def see_server(self) -> None:
        """See that the API server answers, and start one where that is ours to do. Raises CloudUnavailable."""
        server = self._server
        status = server.get_api_server_status().status
        if status is server.ApiServerStatus.HEALTHY:
            return
        server.get_api_server_status_response.cache_clear()  # the next call asks anew
        url = server.redact_url_password(server.get_server_url())
        if status is server.ApiServerStatus.NEEDS_AUTH:
            raise CloudUnavailable(f"the API server at {url} wants a login: run `sky api login -e {quote(url)}`")
        if status is server.ApiServerStatus.VERSION_MISMATCH:
            message = f"the API server at {url} is of another version: run `sky api stop`, or upgrade it"
            raise CloudUnavailable(message)
        if not server.is_api_server_local():
            raise CloudUnavailable(
                f"the API server at {url} does not answer; see `curl {quote(f'{url}/api/health')}`"
            )
        with self._starting:
            if server.get_api_server_status().status is not server.ApiServerStatus.HEALTHY:
                start_server(self._log())
                server.get_api_server_status_response.cache_clear()

    def _log_of(self, request: str) -> str:
        """The end of a request's log: it alone has the words in which a cloud refused a machine."""
        text = io.StringIO()

        def stream() -> None:
            self._sdk.stream_and_get(request, tail=LOG_LINES, follow=False, output_stream=text)

        try:
            Call(lambda: "", lambda _: stream(), lambda _: None).result(LOG_TIMEOUT_S)
        except Exception:  # noqa: BLE001 without it the failure is still told, only less exactly
            return ""
        return text.getvalue()


# Starts a SkyPilot API server on this machine, and ends what a dead one has left.
# The server leads a session of its own. When it is killed its executors live on: they ignore SIGTERM, hold port
# 50011, without which no new server starts, and go on with the launch they were at. Nothing they know is needed:
# what they have made is on record, and launching the same name again takes it up.
START_TIMEOUT_S = 120.0


def start_server(log: Path) -> None:
    """Start an API server that logs to `log`, beside this process and not below it: it outlives this one.

    Raises CloudUnavailable.
    """
    end_orphans(log.parent)
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
        raise CloudUnavailable(f"SkyPilot's API server does not start; see {log}") from None
    if started.returncode:
        raise CloudUnavailable(f"SkyPilot's API server does not start; see {log}, then `sky api stop`")


def end_orphans(state: Path) -> list[int]:
    """SIGKILL what outlived a dead API server whose files are below `state`. Returns the pids, none on a Mac.

    A process is such an orphan when the leader of its session is dead and it has a file below `state` open, or
    when one of those started it. A session that was begun outside of this container has number 0: nothing is known
    of its leader.
    """
    ended = []
    while pids := [pid for pid in _orphans(state.resolve()) if pid not in ended]:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        ended += pids
    return ended


def _orphans(state: Path) -> list[int]:
    parents = {one.pid: one.info["ppid"] for one in psutil.process_iter(["ppid"]) if _has_lost_its_leader(one.pid)}
    found = [pid for pid in parents if _has_open_below(pid, state)]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid and child not in found]
    return found


def _has_lost_its_leader(pid: int) -> bool:
    """Whether a process lives, and the leader of its session does not."""
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
    """Whether it has a file below `folder` open, also one that was deleted, which psutil leaves out."""
    try:
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False  # it has ended, or is another user's
    return any(link.startswith(f"{folder}/") for link in links)
