"""A store that an older version wrote is read, and its run goes on to the end."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from checkpoint.stream.catalog import Catalog, Checkpoint
from policies.model.vocabulary import RunPhase
from tests.e2e.harness import Run
from tests.e2e.tiny import NODE_PYTHON, RUN_TIMEOUT_S

pytestmark = [pytest.mark.whole, pytest.mark.slow]

ARCHIVE = Path(__file__).parent / "older" / "run.tar.xz"
WRITTEN_AT = "/tmp/older"
STEPS = 60


@pytest.fixture
def older(tmp_path: Path) -> Iterator[Run]:
    """The run of `older/README.md`, below `tmp_path`."""
    folder = tmp_path / "run"
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    folder.mkdir()
    (tmp_path / "store").rename(folder / "store")
    (tmp_path / "rewards.py").rename(folder / "rewards.py")
    record = folder / "store" / "run.json"
    record.write_text(record.read_text().replace(WRITTEN_AT, str(tmp_path)))
    run = Run(folder, json.loads(record.read_text())["spec"], NODE_PYTHON)
    yield run
    run.end()


def test_it_is_read_and_goes_on(older: Run) -> None:
    before = older.json("status", older.url)
    assert (before["phase"], before["timeline"], before["step"]) == ("stopped", 1, 19)
    assert older.json("report", older.url)["steps"] == 19
    told = [json.loads(line)["type"] for line in older.cli("events", "-o", "json", older.url).stdout.splitlines()]
    assert {"RunCreated", "JobRestarted", "RollbackBegun", "FleetMoved"} <= set(told)
    older.cli("checkpoints", "verify", older.url)
    assert [str(one.at) for one in checkpoints(older)][-1] == "1-15"

    older.cli("resume", older.url, "-d")
    older.until("the end", lambda: older.state.phase is RunPhase.FINISHED and not older.state.nodes, RUN_TIMEOUT_S)
    report = older.json("report", older.url)
    assert report["steps"] == STEPS
    assert report["reward_last"] > report["reward_first"] + 0.2
    assert str(checkpoints(older)[-1].at) == f"1-{STEPS}"


def checkpoints(run: Run) -> Sequence[Checkpoint]:
    return Catalog(run.store, "test").newest().checkpoints
