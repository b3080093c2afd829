"""How a store is named and reached: URLs, options, the environment, AWS profiles."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.store.errors import NotFound, StoreDenied, StoreUnusable
from grpo_orch.checkpoint.store.run_store import OPTIONS_ENV, Store
from tests.rigs.store.server import S3Server


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the environment nor the home of whoever runs the tests takes part."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE", "REGION", "DEFAULT_REGION"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv(OPTIONS_ENV, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nonsense", "expected a URL that starts with file://, s3://"),
        ("nobody-knows://user:hunter2@host/y", "unknown scheme; expected a URL that starts with file://"),
        ("s3:///no-bucket", "names no bucket"),
    ],
)
def test_invalid_store_url_is_one_clear_line(url: str, told: str) -> None:
    with pytest.raises(StoreUnusable, match=told) as caught:
        Store(url)
    assert not any(word in str(caught.value) for word in ("\n", "hunter2"))


def test_unwritable_folder_is_one_line_at_the_first_write() -> None:
    store = Store("file:///proc/nowhere/run")
    assert store.get_or_none("run.json") is None
    with pytest.raises(StoreUnusable, match="name a folder that can be written") as caught:
        store.create("run.json", b"1")
    assert "\n" not in str(caught.value)


def test_reading_makes_no_folder_and_the_first_write_does(tmp_path: Path) -> None:
    folder = tmp_path / "typo" / "run"
    looks, writes = (Store(f"file://{folder}", options={}) for _ in range(2))
    assert looks.get_or_none("run.json") is None
    assert looks.entries("journal") == []
    assert looks.folders("checkpoints") == []
    looks.delete(["run.json"])
    looks.sweep("journal", 0.0)
    with pytest.raises(NotFound):
        looks.secure(["run.json"])
    assert not (tmp_path / "typo").exists()
    writes.create("run.json", b"1")
    assert looks.get("run.json") == b"1", "a store that was opened before anything was there finds it"


def test_key_outside_or_unlistable_folder_is_an_error(tmp_path: Path) -> None:
    store = Store((tmp_path / "run").as_uri())
    store.put("journal", b"a file where a folder should be")
    calls: list[Callable[[], object]] = [
        lambda: store.entries("journal"),
        lambda: store.get("journal/../../other"),
        lambda: store.put(str(tmp_path / "other"), b"an absolute key"),
    ]
    for call in calls:
        with pytest.raises(StoreUnusable):
            call()
    assert store.entries("nowhere") == []
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("url", "options", "told"),
    [
        ("s3://bucket/run", {"regoin": "eu"}, "option 'regoin'"),
        ("s3://bucket/run", {"region": "eu", "timeout": "soon"}, "option 'timeout'"),
        ("s3://bucket/run", {"unsigned_payload": "perhaps"}, "option 'unsigned_payload'"),
        ("s3://bucket/run", {"region": 7}, "option 'region'"),
        ("s3://bucket/run", {"driver": "boto"}, "option 'driver'"),
        ("s3://bucket/run", {"profile": "nobody"}, "profile 'nobody'"),
        ("file:///tmp/x", {"region": "eu"}, "option 'region'"),
    ],
)
def test_a_wrong_option_is_named(url: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(StoreUnusable, match=told) as caught:
        Store(url, options=options)
    assert "\n" not in str(caught.value)


def test_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS_ENV, '{"regoin": "eu"}')
    with pytest.raises(StoreUnusable, match="option 'regoin'"):
        Store("s3://bucket/run")
    Store("s3://bucket/run", options={})
    monkeypatch.setenv(OPTIONS_ENV, '["a"]')
    with pytest.raises(StoreUnusable, match=OPTIONS_ENV):
        Store("s3://bucket/run")


def works(ceph: S3Server, options: dict[str, Any] | None = None) -> bool:
    """Whether Ceph takes the credentials: moto would take any."""
    store = Store(ceph.url("named"), options=options, retry_s=1)
    store.put("a", b"1")
    return store.get("a") == b"1"


def test_the_environment_names_endpoint_and_credentials(ceph: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", ceph.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ceph.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ceph.secret_key)
    assert works(ceph)


@pytest.fixture
def aws_files(ceph: S3Server, tmp_path: Path) -> Path:
    folder = tmp_path / ".aws"
    folder.mkdir()
    keys = f"aws_access_key_id = {ceph.access_key}\naws_secret_access_key = {ceph.secret_key}\n"
    wrong = "aws_access_key_id = rig-access\naws_secret_access_key = wrong\n"
    (folder / "credentials").write_text(f"[default]\n{wrong}[team]\n{keys}")
    place = f"region = us-east-1\nendpoint_url = {ceph.endpoint}\n"
    (folder / "config").write_text(f"[default]\n{place}[profile team]\n{place}[profile empty]\n{place}")
    return folder


def test_profiles(ceph: S3Server, aws_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert works(ceph, {"profile": "team"})
    with pytest.raises(StoreDenied, match="check the access key"):
        works(ceph)  # the default profile's are wrong
    monkeypatch.setenv("AWS_PROFILE", "team")
    assert works(ceph)
    with pytest.raises(StoreDenied, match="'empty' has no credentials"):
        Store(ceph.url("named"), options={"profile": "empty"})
    (aws_files / "credentials").unlink()
    with pytest.raises(StoreDenied):
        works(ceph)


def test_keys_in_the_environment_go_before_the_default_profile(
    ceph: S3Server, aws_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert aws_files.exists()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ceph.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ceph.secret_key)
    assert works(ceph)


def test_killed_writers_leftovers_are_deleted_once_old(tmp_path: Path) -> None:
    store = Store((tmp_path / "run").as_uri())
    store.put("blobs/one", b"1")
    for name in ("two#1", "three#12", "notes#me"):
        (tmp_path / "run" / "blobs" / name).write_bytes(b"half")
    os.utime(tmp_path / "run" / "blobs" / "two#1", (0, 0))
    os.utime(tmp_path / "run" / "blobs" / "notes#me", (0, 0))
    store.sweep("blobs", 3600.0)
    assert sorted(path.name for path in (tmp_path / "run" / "blobs").iterdir()) == ["notes#me", "one", "three#12"]
    store.sweep("nowhere", 0.0)
