"""Requests to SkyPilot's API server, with deadlines and our errors. Imports no SkyPilot."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any

from orchestrator.clouds.protocol import CloudUnavailable
from orchestrator.clouds.sky.sdk.calls import Call, failure_of, nothing_refused
from orchestrator.clouds.sky.sdk.errors import HAS_LOG, understand
from orchestrator.clouds.sky.sdk.server import start_server

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
