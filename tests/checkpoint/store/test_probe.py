"""The probe passes stores that a run can use, and refuses the others in one line."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem

from grpo_orch.checkpoint.store.backends import BytesLike
from grpo_orch.checkpoint.store.errors import AlreadyExists, StoreDenied, StoreUnavailable, StoreUnusable
from grpo_orch.checkpoint.store.probe import FOLDER, probe
from grpo_orch.checkpoint.store.run_store import Entry, Store
from tests.rigs.store.fault_proxy import Answer, Away, Fault, FaultProxy, IgnoreConditions, LoseAnswer, WrongBytes
from tests.rigs.store.server import S3Server


@pytest.mark.parametrize("driver", ["", "fsspec"])
def test_a_store_that_ignores_conditions_is_refused(
    moto: S3Server, proxy: FaultProxy, tmp_path: Path, driver: str
) -> None:
    proxy.inject(IgnoreConditions())
    server = moto.at(proxy.endpoint)
    store = Store(server.url(tmp_path.name), options=server.fsspec_options() if driver else server.options())
    with pytest.raises(StoreUnusable, match="ignores create-only writes: two controllers") as caught:
        probe(store)
    assert store.url in str(caught.value)
    assert "\n" not in str(caught.value)
    assert store.entries(FOLDER) == []


class Broken(Store):
    """A memory store that lies about one thing."""

    lie = ""

    def create(self, key: str, data: BytesLike) -> None:
        if self.lie == "refuses but writes" and self.get_or_none(key) is not None:
            self.put(key, data)
        super().create(key, data)

    def get(self, key: str) -> bytes:
        content = super().get(key)
        return b"first" if self.lie == "stale" and content == b"third" else content

    def entries(self, prefix: str, *, after: str | None = None) -> list[Entry]:
        return [] if self.lie == "lists late" else super().entries(prefix, after=after)

    def delete(self, keys: list[str]) -> None:  # type: ignore[override]  # narrower, as the probe calls it
        if self.lie != "keeps":
            super().delete(keys)


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        ("refuses but writes", "a refused write changed it"),
        ("stale", "returns the old object"),
        ("lists late", "does not list"),
        ("keeps", "does not delete objects"),
    ],
)
def test_every_lie_is_found_out(lie: str, told: str) -> None:
    store = Broken(f"memory://probe-{lie}")
    store.lie = lie
    with pytest.raises(StoreUnusable, match=told):
        probe(store)
    if lie != "keeps":
        store.lie = ""
        assert store.entries(FOLDER) == []


class LooksFirst(Store):
    """Creates as most filesystems of fsspec do: looks for the object, and then writes it."""

    def create(self, key: str, data: BytesLike) -> None:
        if self.get_or_none(key) is not None:
            raise AlreadyExists(key)
        time.sleep(0.005)  # the way there and back
        self.put(key, data)


def test_a_store_on_which_two_win_at_the_same_moment_is_refused() -> None:
    store = LooksFirst("memory://probe-looks-first")
    with pytest.raises(
        StoreUnusable, match=r"[2-8] of 8 concurrent create-only writes of one object succeeded: two controllers"
    ):
        probe(store)
    assert store.entries(FOLDER) == []


def test_an_fsspec_filesystem_without_a_create_only_write_is_refused_without_a_race() -> None:
    class Other(AbstractFileSystem):
        """Inherits everything from fsspec, as those of SFTP, SMB, HDFS and FTP do."""

        protocol = "other"

        def exists(self, path: str, **_: object) -> bool:
            raise AssertionError(f"{path} was looked for")

        def rm_file(self, path: str) -> None:
            raise FileNotFoundError(path)

    fsspec.register_implementation("other", Other, clobber=True)
    with pytest.raises(StoreUnusable, match="fsspec's Other has no atomic create-only write; use a"):
        probe(Store("other://host/run", retry_s=0.0))


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Answer(403, "AccessDenied"), pytest.raises(StoreDenied)),
        (Away(), pytest.raises(StoreUnavailable)),
        (WrongBytes(), pytest.raises(StoreUnusable, match="does not return what was written")),
    ],
    ids=str,
)
def test_a_fault_is_what_it_is_and_a_lost_answer_is_no_lie(
    moto: S3Server, proxy: FaultProxy, tmp_path: Path, fault: Fault, error: AbstractContextManager[object]
) -> None:
    server = moto.at(proxy.endpoint)
    store = Store(server.url(tmp_path.name), options=server.options(), retry_s=0.3)
    proxy.inject(fault)
    with error:
        probe(store)
    proxy.heal()
    proxy.inject(LoseAnswer(), times=1)
    probe(Store(store.url, options=server.options()))
