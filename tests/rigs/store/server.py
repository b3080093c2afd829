"""Shared by the rigs: an S3 server that tests may use, and processes that end with the test."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_orch.checkpoint.store.run_store import Store
from tests.budget import HANG_S

REGION = "us-east-1"
FIRST_PORT = 10_000  # many of those below have names


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where an S3 server listens, a user of it, and a bucket of that user's."""

    endpoint: str
    access_key: str
    secret_key: str
    bucket: str = "rig-bucket"

    def options(self, **more: Any) -> dict[str, Any]:
        """Options of a Store through obstore."""
        keys = {"access_key_id": self.access_key, "secret_access_key": self.secret_key}
        return {"endpoint": self.endpoint, "region": REGION, **keys, **more}

    def url(self, name: str) -> str:
        return f"s3://{self.bucket}/{name}"

    def at(self, endpoint: str) -> S3Server:
        """The same server reached another way."""
        return replace(self, endpoint=endpoint)

    def client(self) -> Any:
        """A botocore client, to look past the Store at what is really there."""
        from botocore.config import Config
        from botocore.session import get_session

        return get_session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required"),
        )


def through(server: S3Server, name: str, retry_s: float, hang_s: float = HANG_S, whole_s: float = HANG_S) -> Store:
    """A store that gives up a request of which nothing is heard for `hang_s`, or that takes longer than `whole_s`:
    seconds where one is to hang, so that tests do not take half a minute."""
    options = server.options(read_timeout=f"{hang_s:g}s", timeout=f"{whole_s:g}s")
    return Store(server.url(name), retry_s=retry_s, options=options)


def free_port() -> int:
    """A port for a server that binds it later: none that the kernel gives to whoever asks for any, or connects."""
    kernels_first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    below = range(FIRST_PORT, kernels_first) or range(FIRST_PORT, 2**16)  # where it gives out nearly all
    return next(port for port in random.SystemRandom().sample(below, len(below)) if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process for as long as the block runs; its output goes to `log`."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    """Return once something listens. Raises RuntimeError, with the end of the log, when the process does not."""

    def listens() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    wait_until(listens, process, log, timeout_s)


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    """Ask until `ready`. Raises RuntimeError, with the end of the log, if the process ends or time is up."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            state = "did not start in time" if process.poll() is None else f"ended with {process.returncode}"
            raise RuntimeError(
                f"{process.args!r} {state}; {log} ends with:\n{log.read_text('utf-8', 'replace')[-2000:]}"
            )
        time.sleep(0.05)
