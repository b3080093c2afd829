"""A peer of the run that answers as it should not."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from checkpoint.security import identity

Answer = Callable[["Liar", socket.socket, int], None]


class Liar:
    """Says that it has all chunks, and answers each request for one by `answer`. `asked` counts those."""

    def __init__(self, host: str, names: Sequence[str], size_bytes: int, answer: Answer, token: str) -> None:
        self.asked = 0
        self.over = threading.Event()
        self._names = json.dumps(list(names)).encode()
        self._size_bytes = size_bytes
        self._answer = answer
        self._tls = identity.server_context(token) if identity.protects(host) else None
        self._listening = socket.create_server((host, 0))
        self.address = identity.address(host, self._listening.getsockname()[1])
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        self.over.set()
        self._listening.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                sock, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError, ssl.SSLError), plain, self._secured(plain) as sock:
            while request := sock.recv(65536):
                if b"GET /on-hand/" in request:
                    send(sock, 200, self._names)
                    return  # for chunks, who asks connects anew, and waits as long as it does by then
                self.asked += 1
                self._answer(self, sock, self._size_bytes)

    def _secured(self, plain: socket.socket) -> socket.socket:
        return plain if self._tls is None else self._tls.wrap_socket(plain, server_side=True)


def send(sock: socket.socket, status: int, body: bytes, size_bytes: int | None = None) -> None:
    length = len(body) if size_bytes is None else size_bytes
    sock.sendall(f"HTTP/1.1 {status} Said\r\nContent-Length: {length}\r\n\r\n".encode() + body)


def garbage(_: Liar, sock: socket.socket, size_bytes: int) -> None:
    send(sock, 200, bytes(size_bytes))


def half(_: Liar, sock: socket.socket, size_bytes: int) -> None:
    send(sock, 200, bytes(size_bytes // 2), size_bytes)
    sock.shutdown(socket.SHUT_RDWR)


def too_little(_: Liar, sock: socket.socket, size_bytes: int) -> None:
    send(sock, 200, bytes(size_bytes // 2))


def stalls(liar: Liar, sock: socket.socket, size_bytes: int) -> None:
    send(sock, 200, b"", size_bytes)
    liar.over.wait()


def drips(liar: Liar, sock: socket.socket, size_bytes: int) -> None:
    send(sock, 200, b"", size_bytes)
    while not liar.over.wait(0.05):
        sock.sendall(b"x")


def silent(liar: Liar, _: socket.socket, _size_bytes: int) -> None:
    liar.over.wait()


def promises(_: Liar, sock: socket.socket, _size_bytes: int) -> None:
    time.sleep(0.05)  # a real one holds the request for longer
    send(sock, 202, b"")


def refuses(_: Liar, sock: socket.socket, _size_bytes: int) -> None:
    send(sock, 500, b"")


def has_nothing(_: Liar, sock: socket.socket, _size_bytes: int) -> None:
    send(sock, 404, b"")


def no_http(_: Liar, sock: socket.socket, size_bytes: int) -> None:
    sock.sendall(bytes(size_bytes))


@contextmanager
def liar(host: str, names: Sequence[str], size_bytes: int, answer: Answer, token: str) -> Iterator[Liar]:
    one = Liar(host, names, size_bytes, answer, token)
    try:
        yield one
    finally:
        one.close()
