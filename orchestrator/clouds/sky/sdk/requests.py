"""Requests to SkyPilot's API server, with deadlines and our errors. Imports no SkyPilot."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any

import psutil

from orchestrator.clouds.protocol import CloudUnavailable
from orchestrator.clouds.sky.sdk.calls import Call, failure_of, nothing_refused
from orchestrator.clouds.sky.sdk.errors import HAS_LOG, understand

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
