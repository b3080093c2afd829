"""A real store that fails: what test_faults tries with moto, where a real store may differ."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from checkpoint.store.errors import AlreadyExists, StoreDenied, StoreUnavailable
from checkpoint.store.run_store import Store
from tests.rigs.store.fault_proxy import Answer, CutDownload, CutUpload, Fault, FaultProxy, LoseAnswer
from tests.rigs.store.server import S3Server, through

DATA = os.urandom(3 << 20)


@pytest.mark.parametrize(
    "fault", [Answer(503, "SlowDown"), CutUpload(1 << 20), LoseAnswer(), CutDownload(1 << 20)], ids=str
)
def test_the_same_on_ceph(ceph: S3Server, ceph_proxy: FaultProxy, tmp_path: Path, fault: Fault) -> None:
    store = through(ceph.at(ceph_proxy.endpoint), tmp_path.name, "", 10.0)
    ceph_proxy.inject(fault, times=1)
    store.put("a/large", DATA)
    ceph_proxy.inject(fault, times=1)
    assert store.get("a/large") == DATA


def test_a_create_on_ceph_whose_answer_is_lost_makes_one_object(
    ceph: S3Server, ceph_proxy: FaultProxy, tmp_path: Path
) -> None:
    store = through(ceph.at(ceph_proxy.endpoint), tmp_path.name, "", 10.0)
    ceph_proxy.inject(LoseAnswer(), times=1)
    with pytest.raises(AlreadyExists):
        store.create("j/1", b"mine")
    assert [(entry.key, store.get(entry.key)) for entry in store.entries("j")] == [("j/1", b"mine")]


@pytest.mark.parametrize("driver", ["", "fsspec"])
def test_ceph_says_that_a_quota_is_used_up(ceph_users: tuple[S3Server, S3Server], driver: str) -> None:
    full = ceph_users[1]
    options = full.fsspec_options() if driver else full.options()
    with pytest.raises(StoreUnavailable, match=r"QuotaExceeded.*free some space"):
        Store(full.url("run"), retry_s=0.5, options=options).put("a", b"too much")


def test_ceph_denies_a_wrong_secret_without_telling_it(ceph: S3Server) -> None:
    options = ceph.options(secret_access_key="a-wrong-secret")
    with pytest.raises(StoreDenied, match="check the access key") as caught:
        Store(ceph.url("run"), options=options).get("a")
    assert "a-wrong-secret" not in str(caught.value)
