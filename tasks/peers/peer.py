"""Another node as the one that asks it sees it: its answers, and for how long it is left alone after a failure.

A peer may be gone, silent, slow, or lie. Each is noticed within seconds, by what comes and not by whether all has
come, and costs that time only.
"""

from __future__ import annotations

import http.client
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from urllib.parse import quote

import msgspec
import structlog

from tasks.peers.server import CHUNKS, HOLD_S, ON_HAND, PIECE_BYTES

log = structlog.get_logger()

CONNECT_S = 4.0  # with TLS's handshake
SILENT_S = 5.0  # beyond what a peer may hold a request for, and between two of its bytes
CHUNK_S = 30.0  # for a whole one: what the store is given for a request that hangs
IDLE_MAX = 4  # connections that are kept for the next download
SHUN_S = (30.0, 3600.0)  # after a first failure, doubled up to the second
ON_HAND_BYTES_MAX = 64 << 20  # names of a terabyte in chunks


class No(Enum):
    """Why a peer does not give a chunk."""

    NOT_YET = "it waits for it, too"
    NOT_HERE = "it neither has nor wants it"
    FAILED = "it does not answer as it should"


class Peer:
    """One address. Thread-safe.

    Args:
        tls: None where the address is loopback.
    """

    def __init__(self, address: str, token: str, tls: ssl.SSLContext | None) -> None:
        self.address = address
        self._headers = {"Authorization": f"Bearer {token}"}
        self._tls = tls
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._lock = threading.Lock()
        self._shunned_until_s = 0.0
        self._shun_s = SHUN_S[0]

    @property
    def is_up(self) -> bool:
        """Whether asking it makes sense, by what is known."""
        return time.monotonic() >= self._shunned_until_s

    def on_hand(self, root: str, by: str) -> frozenset[str] | None:
        """The chunks below `root` that it has or is getting from the store, after it was told that the node `by`
        wants them; None where it takes no part, or does not answer."""
        try:
            with self._asked(f"{ON_HAND}/{quote(root)}?by={quote(by)}") as answer:
                data = _body(answer, min(answer.length or 0, ON_HAND_BYTES_MAX))
                return frozenset(msgspec.json.decode(data, type=list[str])) if answer.status == 200 else None
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            self.shun(str(error) or type(error).__name__)
            return None

    def ask(self, root: str, chunk: str, size_bytes: int, room: Callable[[], None]) -> memoryview | No:
        """The chunk as it says that it is, or why there is none. `room` is called before the bytes come, for it
        may be long until then."""
        try:
            with self._asked(f"{CHUNKS}/{quote(root)}/{quote(chunk)}") as answer:
                if answer.status == 200:
                    room()
                data = _body(answer, size_bytes if answer.status == 200 else 0)
        except (OSError, http.client.HTTPException) as error:
            self.shun(str(error) or type(error).__name__)
            return No.FAILED
        match answer.status:
            case 200:
                self._shun_s = SHUN_S[0]
                return data
            case 202:
                return No.NOT_YET
            case 404:
                return No.NOT_HERE
            case status:
                self.shun(f"it answers {status}")
                return No.FAILED

    def shun(self, why: str) -> None:
        """Leave it alone for a while, and for longer each time that it fails again."""
        with self._lock:
            if not self.is_up:  # several requests have failed together
                return
            log.warning("peer_failed", address=self.address, why=why, left_alone_s=self._shun_s)
            self._shunned_until_s = time.monotonic() + self._shun_s
            self._shun_s = min(2 * self._shun_s, SHUN_S[1])
        self.close()

    def close(self) -> None:
        """Close the connections that are idle."""
        while self._idle:
            self._idle.popleft().close()

    def greet(self) -> None:
        """Connect, for later, or remember that it cannot be reached."""
        try:
            self._keep(self._connect())
        except (OSError, http.client.HTTPException) as error:
            self.shun(str(error) or type(error).__name__)

    @contextmanager
    def _asked(self, path: str) -> Iterator[http.client.HTTPResponse]:
        """The answer, whose body the block reads to its end. Raises OSError, HTTPException."""
        connection, answer = self._answer(path)
        try:
            yield answer
        except BaseException:
            connection.close()
            raise
        self._keep(connection)

    def _answer(self, path: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        while True:
            try:
                connection, kept = self._idle.pop(), True
            except IndexError:
                connection, kept = self._connect(), False
            try:
                connection.request("GET", path, headers=self._headers)
                return connection, connection.getresponse()
            except BaseException as error:
                connection.close()
                if not kept or not isinstance(error, ConnectionError):  # a kept one may have been closed meanwhile
                    raise

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        if len(self._idle) < IDLE_MAX and self.is_up:
            self._idle.append(connection)
        else:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        connection = (
            http.client.HTTPConnection(self.address, timeout=CONNECT_S)
            if self._tls is None
            else http.client.HTTPSConnection(self.address, timeout=CONNECT_S, context=self._tls)
        )
        connection.connect()
        connection.sock.settimeout(HOLD_S + SILENT_S)
        return connection


def _body(answer: http.client.HTTPResponse, size_bytes: int) -> memoryview:
    """A body of exactly that size. Raises OSError where it comes too slowly, HTTPException where it is another."""
    if answer.length != size_bytes:
        raise http.client.HTTPException(f"{answer.length} bytes where {size_bytes} were asked for")
    data, got, begun_s = bytearray(size_bytes), 0, time.monotonic()
    while got < size_bytes:
        piece = answer.read1(min(PIECE_BYTES, size_bytes - got))
        if not piece:
            raise http.client.IncompleteRead(bytes(0), size_bytes - got)
        data[got : got + len(piece)] = piece
        got += len(piece)
        late_s = time.monotonic() - begun_s - SILENT_S
        if late_s > CHUNK_S * got / size_bytes:
            raise TimeoutError(f"{got} of {size_bytes} bytes in {late_s + SILENT_S:.1f} s")
    answer.read()  # the end, without which the connection cannot be used again
    return memoryview(data)
