"""What this machine keeps of its runs: whole or not at all, and what is said where nothing can be kept."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_orch.orchestrator.home import (
    HomeUnusable,
    known_token,
    latest_run,
    remember_run,
    run_token,
    saved_store_options,
    token_file,
)
from grpo_orch.policies.model import exit_codes
from tests.generators.views_world import World
from tests.rigs.command_line import Cli


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file gets longer than ten bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_secret_is_made_whole_or_not_at_all(home: Path) -> None:
    """With an empty one anybody could speak to the run's machines."""
    with full_disk(), pytest.raises(HomeUnusable, match="File too large; fix that, or set GRPO_ORCH_HOME to"):
        run_token("a-run")
    assert known_token("a-run") is None
    assert list((home / "a-run").iterdir()) == []
    assert len(run_token("a-run")) == 43


def test_an_empty_secret_is_none(home: Path) -> None:
    token_file("a-run").touch()
    with pytest.raises(HomeUnusable, match=f"^{home}/a-run/token is empty; copy it from"):
        run_token("a-run")


def test_simultaneous_creators_of_a_secret_get_the_same(home: Path) -> None:
    ready, found = threading.Barrier(8), []

    def make() -> None:
        ready.wait()
        found.append(run_token("a-run"))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert set(found) == {known_token("a-run")}
    assert os.listdir(home / "a-run") == ["token"]


def test_the_latest_run_is_noted_whole(home: Path) -> None:
    remember_run("s3://bucket/grün")
    with full_disk(), pytest.raises(HomeUnusable):
        remember_run("s3://bucket/other")
    assert latest_run() == "s3://bucket/grün"
    assert os.listdir(home) == ["latest"]


def test_user_without_home_can_view_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container under a number that has no name."""
    for name in ("GRPO_ORCH_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", _no_home)
    assert (latest_run(), saved_store_options("s3://bucket/run"), known_token("a-run")) == (None, {}, None)
    with pytest.raises(HomeUnusable, match="this user has no home folder; set GRPO_ORCH_HOME"):
        run_token("a-run")


def _no_home(_: Path) -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("home", ["/dev/null", "/proc/nothing", "/dev/null/below"])
@pytest.mark.parametrize("command", ["resume", "down", "logs daemon"])
def test_a_home_that_cannot_be_written_is_one_line(
    home: str, command: str, monkeypatch: pytest.MonkeyPatch, grpo_orch: Cli
) -> None:
    monkeypatch.setenv("GRPO_ORCH_HOME", home)
    told = grpo_orch(*command.split(), World().store.url)
    assert told.code == exit_codes.FAILED
    assert told.line.startswith("/")
    assert told.line.endswith("; fix that, or set GRPO_ORCH_HOME to another folder")
