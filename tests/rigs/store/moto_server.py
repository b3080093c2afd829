"""moto's S3 in a process of its own: quick to start, exact about conditions, no real store."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.rigs.store.server import S3Server, free_port, running, wait_for_port


@contextlib.contextmanager
def moto_server(folder: Path) -> Iterator[S3Server]:
    """An S3 server with one bucket. It does not look at credentials."""
    port = free_port()
    log = folder / "moto.log"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, log) as process:
        wait_for_port(port, process, log, timeout_s=30)
        server = S3Server(f"http://127.0.0.1:{port}", "rig-access", "rig-secret-0123456789")
        server.client().create_bucket(Bucket=server.bucket)
        yield server
