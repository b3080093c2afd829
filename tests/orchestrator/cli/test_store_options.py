"""Which options a command opens its store with, and where this machine keeps them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from grpo_orch.checkpoint.store.run_store import OPTIONS_ENV
from grpo_orch.orchestrator.cli.target import keep_options, open_store, storage_of
from grpo_orch.orchestrator.config.load import Storage
from grpo_orch.orchestrator.home import save_store_options, saved_store_options

URL = "s3://bucket/run"
BASE = {"region": "here", "access_key_id": "key"}


def options(secret: str) -> dict[str, str]:
    return {**BASE, "secret_access_key": secret}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(OPTIONS_ENV, "")  # so that it is as before once the test has ended
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


# what run.yaml says (None: a URL is the target), what the environment says, what was kept, what holds
@pytest.mark.parametrize(
    ("written", "environment", "kept", "holds"),
    [
        ("yaml", "environment", "kept", "yaml"),
        ("yaml", "", "kept", "yaml"),
        ("", "environment", "kept", "environment"),
        ("", "", "kept", ""),
        (None, "environment", "kept", "environment"),
        (None, "", "kept", "kept"),
        (None, "", "", ""),
    ],
)
def test_precedence_of_store_options(
    monkeypatch: pytest.MonkeyPatch, written: str | None, environment: str, kept: str, holds: str
) -> None:
    if environment:
        monkeypatch.setenv(OPTIONS_ENV, json.dumps(options(environment)))
    if kept:
        save_store_options(URL, options(kept))
    save_store_options(URL + "-other", options("another store's"))
    Path("run.yaml").write_text(
        json.dumps({"storage": {"url": URL, "options": options(written) if written else None}})
    )
    store = open_store(storage_of(URL if written is None else None))
    assert store.url == URL
    assert json.loads(os.environ[OPTIONS_ENV] or "{}") == (options(holds) if holds else {})


def test_stored_options_are_private(home: Path) -> None:
    keep_options(Storage(URL, options("hunter2")))
    keep_options(Storage(URL, options("hunter3")))
    (path,) = (home / "stores").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert "hunter2" not in path.read_text()
    assert saved_store_options(URL) == options("hunter3")


def test_run_yaml_without_options_resets_them_and_url_keeps(home: Path) -> None:
    keep_options(Storage(URL, options("hunter2")))
    keep_options(Storage(URL))
    assert saved_store_options(URL) == options("hunter2")
    keep_options(Storage(URL, {}))
    assert saved_store_options(URL) == {}
    assert list((home / "stores").iterdir()) == []
