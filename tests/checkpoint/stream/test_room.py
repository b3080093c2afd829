"""How much of a download is in memory at a time, with the transfers of a node of 32 cores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from blake3 import blake3

from checkpoint.stream import chunks, manifest, receiving
from checkpoint.stream.chunks import CHUNK_BYTES
from checkpoint.stream.receiving import IN_FLIGHT_BYTES
from checkpoint.stream.room import Room
from policies.model.vocabulary import PolicyVersion
from tests.budget import HANG_S
from tests.stand_ins.catalog_rig import CHUNK, DictStore

OF_32_CORES = 128
S3_BYTES_PER_S = 85e6  # of each transfer


def test_what_may_be_in_flight_carries_90_gbit_from_s3_and_is_little_of_what_travels() -> None:
    assert IN_FLIGHT_BYTES // CHUNK_BYTES * S3_BYTES_PER_S * 8 > 87e9
    assert IN_FLIGHT_BYTES < 0.02 * 141e9, "a 70B model in bfloat16"


class Flight(DictStore):
    """A store, and a peer, whose answers begin to come once as many are asked for as may be at a time."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self.most_bytes = most_bytes
        self.peak_bytes = self._bytes = 0
        self._lock, self._full = threading.Lock(), threading.Event()

    def get_buffer(self, key: str) -> memoryview:
        data = super().get_buffer(key)
        with self._lock:
            self._bytes += len(data)
            self.peak_bytes = max(self.peak_bytes, self._bytes)
            if self._bytes >= self.most_bytes:
                self._full.set()
        assert self._full.wait(HANG_S)
        return data

    def written(self, size_bytes: int) -> None:
        with self._lock:
            self._bytes -= size_bytes

    @contextmanager
    def download(self, root: str, _: Sequence[str], __: Sequence[Path]) -> Iterator[Peer]:
        yield Peer(self, root)


class Peer:
    """Has every second chunk, when it is asked."""

    def __init__(self, flight: Flight, root: str) -> None:
        self.flight, self.root = flight, root

    def expects(self, chunk: str) -> bool:
        return int(chunk[0], 16) % 2 == 0

    def get(self, chunk: str, _: int, __: Callable[[], None], room: Callable[[], None]) -> memoryview | None:
        if not self.expects(chunk):
            return None
        room()
        return self.flight.get_buffer(f"{self.root}/{chunk}")

    def get_at_once(self, *_: object) -> None:
        raise AssertionError("the store does not fail")

    def blame(self, chunk: str) -> None:
        raise AssertionError(f"{chunk} is as it was")

    def put(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("peers", [False, True], ids=["store alone", "with peers"])
def test_of_a_70b_model_no_more_is_in_flight_than_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, peers: bool
) -> None:
    """Its 9,000 chunks, made small, over the transfers of a node of 32 cores."""
    scale = CHUNK_BYTES // CHUNK
    flight = Flight(IN_FLIGHT_BYTES // scale)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(chunks, "TRANSFERS", OF_32_CORES)
    monkeypatch.setattr(receiving, "IN_FLIGHT_BYTES", flight.most_bytes)
    (tmp_path / "from").mkdir()
    content = blake3(b"weights").digest(length=9000 * CHUNK)
    (tmp_path / "from" / "model").write_bytes(content)
    policy = manifest.publish(flight, "root", tmp_path / "from", PolicyVersion(0, 0), 0.0)
    manifest.materialize(
        flight, "root", policy.files, tmp_path / "to", flight.written, elsewhere=flight if peers else None
    )
    assert (tmp_path / "to" / "model").read_bytes() == content
    assert flight.peak_bytes == flight.most_bytes


def test_what_is_larger_than_all_room_comes_alone_and_an_error_gives_its_place_back() -> None:
    room, order = Room(10), list[str]()

    def fails() -> None:
        with room.place(25) as take:
            take()
            take()  # its one place
            order.append("large")
            raise ValueError

    def small() -> None:
        with room.place(5) as take:
            take()
            order.append("small")

    with ThreadPoolExecutor(3) as pool:
        begun = [pool.submit(fails), pool.submit(small), pool.submit(small)]
        with pytest.raises(ValueError):
            begun[0].result(HANG_S)
        for one in begun[1:]:
            one.result(HANG_S)
    assert sorted(order) == ["large", "small", "small"]
