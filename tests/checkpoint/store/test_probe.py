"""The probe passes stores that a run can use, and refuses the others in one line."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from grpo_orch.checkpoint.store.backends import BytesLike
from grpo_orch.checkpoint.store.errors import AlreadyExists, StoreDenied, StoreUnavailable, StoreUnusable
from grpo_orch.checkpoint.store.probe import FOLDER, probe
from grpo_orch.checkpoint.store.run_store import Entry, Store
from tests.rigs.store.fault_proxy import Answer, Away, Fault, FaultProxy, IgnoreConditions, LoseAnswer, WrongBytes
from tests.rigs.store.server import S3Server


def test_a_store_that_ignores_conditions_is_refused(moto: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.inject(IgnoreConditions())
    server = moto.at(proxy.endpoint)
    store = Store(server.url(tmp_path.name), options=server.options())
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
    """Looks for the object, and then writes it."""

    def create(self, key: str, data: BytesLike) -> None:
        if self.get_or_none(key) is not None:
            raise AlreadyExists(key)
        time.sleep(0.005)  # the way there and back
        self.put(key, data)


def test_store_with_two_winners_is_refused() -> None:
    store = LooksFirst("memory://probe-looks-first")
    with pytest.raises(
        StoreUnusable, match=r"[2-8] of 8 concurrent create-only writes of one object succeeded: two controllers"
    ):
        probe(store)
    assert store.entries(FOLDER) == []


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Answer(403, "AccessDenied"), pytest.raises(StoreDenied)),
        (Away(), pytest.raises(StoreUnavailable)),
        (WrongBytes(), pytest.raises(StoreUnusable, match="does not return what was written")),
    ],
    ids=str,
)
def test_probe_passes_faults_on_and_tolerates_lost_answers(
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
