"""moto's S3 in a process of its own: quick to start, exact about conditions, no real store."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.budget import HANG_S
from tests.rigs.store.server import S3Server, running, wait_until

LISTENS = re.compile(rb"^listens at (\d+)$", re.MULTILINE)


@contextlib.contextmanager
def moto_server(folder: Path) -> Iterator[S3Server]:
    """An S3 server with one bucket. It does not look at credentials."""
    log = folder / "moto.log"
    with running([sys.executable, "-m", "tests.rigs.store.moto_server"], log) as process:
        wait_until(lambda: bool(LISTENS.search(log.read_bytes())), process, log, timeout_s=HANG_S)
        [port] = LISTENS.findall(log.read_bytes())
        server = S3Server(f"http://127.0.0.1:{int(port)}", "rig-access", "rig-secret-0123456789")
        server.client().create_bucket(Bucket=server.bucket)
        yield server


def serve() -> None:
    """Serve on a port that is free, one write at a time: moto looks for an object before it writes it, and not in
    one step."""
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    moto, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        with lock if environ["REQUEST_METHOD"] == "PUT" else contextlib.nullcontext():
            return moto(environ, start_response)

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
    print(f"listens at {server.port}", flush=True)  # it does since it was made
    server.serve_forever()


if __name__ == "__main__":
    serve()
