"""Slow stores: one behind a link that all transfers share, and one that gives each transfer so much."""

from __future__ import annotations

import multiprocessing
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from grpo_orch.checkpoint.store.run_store import Store

MOST_BYTES = 1 << 20  # of a body, read at once


class Link(Store):
    """A store behind a link of so many bytes a second, which all transfers share."""

    def __init__(self, url: str, bytes_per_s: float) -> None:
        super().__init__(url)
        self.bytes_per_s = bytes_per_s  # may be changed between transfers
        self._free_at_s, self._lock = 0.0, threading.Lock()

    def put(self, key: str, data: Any) -> None:
        self._pass(len(data))
        super().put(key, data)

    def get_buffer(self, key: str) -> memoryview:
        data = super().get_buffer(key)
        self._pass(len(data))
        return data

    def _pass(self, size_bytes: int) -> None:
        with self._lock:
            self._free_at_s = max(self._free_at_s, time.monotonic()) + size_bytes / self.bytes_per_s
            wait_s = self._free_at_s - time.monotonic()
        time.sleep(max(0.0, wait_s))


@contextmanager
def paced_s3(bytes_per_s: float) -> Iterator[Store]:
    """A stand-in for S3 on loopback, in a process of its own, that takes so many bytes a second of each upload and
    keeps none of them."""
    ready: Any = multiprocessing.Queue()
    process = multiprocessing.Process(target=_serve, args=(bytes_per_s, ready), daemon=True)
    process.start()
    try:
        keys = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
        yield Store("s3://bucket/run", options={"endpoint": f"http://127.0.0.1:{ready.get()}", **keys})
    finally:
        process.terminate()
        process.join()


def _serve(bytes_per_s: float, ready: Any) -> None:
    class Paced(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline():
                begun_s, size_bytes = time.monotonic(), 0
                while line := self.rfile.readline().strip():
                    name, _, value = line.partition(b":")
                    if name.lower() == b"content-length":
                        size_bytes = int(value)
                for at in range(0, size_bytes, MOST_BYTES):
                    self.rfile.read(min(MOST_BYTES, size_bytes - at))
                    time.sleep(max(0.0, begun_s + at / bytes_per_s - time.monotonic()))
                self.wfile.write(b'HTTP/1.1 200 OK\r\nETag: "0"\r\nContent-Length: 0\r\n\r\n')

    class Server(socketserver.ThreadingTCPServer):
        request_queue_size = 256
        daemon_threads = True

    with Server(("127.0.0.1", 0), Paced) as server:
        ready.put(server.server_address[1])
        server.serve_forever()
