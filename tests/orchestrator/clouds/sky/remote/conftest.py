"""A run whose daemon lives on a machine that SkyPilot provisions, and the user who has it.

SkyPilot is a table, twice: the user's, and the controller machine's own, of which the user's knows nothing. The
daemon in its thread is on that machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import structlog

from grpo_orch.checkpoint.records import documents
from grpo_orch.orchestrator.cli import remote
from grpo_orch.orchestrator.clouds.sky.cloud import SkyCloud
from grpo_orch.orchestrator.clouds.sky.records import CloudCheck, Cluster
from grpo_orch.orchestrator.clouds.sky.work import Work
from grpo_orch.orchestrator.control import daemon
from tests.budget import HANG_S
from tests.stand_ins.control_plane import RUN_ID, SkyUser, Table, on_sky

CLUSTER = f"grpo-controller-{RUN_ID}"


class Users(Table):
    """The user's SkyPilot, and beyond it the controller machine with a SkyPilot of its own."""

    def __init__(self, user: World) -> None:
        super().__init__()
        self.beyond = Table()
        self.set_by_user: dict[str, Any] = {}
        self.reasons: list[str] = []
        self.noted: list[documents.ControllerMachine | None] = []  # in the store, as each launch began
        self._user = user

    def launch(self, name: str, work: Work, timeout_s: float) -> Cluster:
        documents.read_run(self._user.store)  # raises: the run comes first
        self.noted.append(documents.CONTROLLER.read(self._user.store))
        launched = super().launch(name, work, timeout_s)
        if self.is_idle(name, timeout_s):
            self.reasons.append(work.env["GRPO_ORCH_REASON"])
            self._user.steer(self._user.store, self.reasons[-1])
        return launched

    def is_idle(self, _name: str, _: float) -> bool:
        return self.idle or not self._user.is_steered()

    def settings(self) -> dict[str, Any]:
        return self.set_by_user

    def log(self, name: str, *, follow: bool) -> Iterator[str]:
        if name not in self.table:
            raise KeyError(name)
        return iter([f"the daemon says{' and goes on' if follow else ''}"])

    def clouds(self) -> list[CloudCheck]:
        return [CloudCheck("aws", True, ""), CloudCheck("gcp", False, "no keys"), CloudCheck("lambda", True, "")]


class World(SkyUser):
    """The user; `sky` has the controller machine, `sky.beyond` those of the run."""

    sky: Users


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for name, value_s in (("POLL_S", 0.01), ("ENDED_EVERY_S", 0.1), ("DAEMON_TIMEOUT_S", HANG_S)):
        monkeypatch.setattr(remote, name, value_s)
    made = World(tmp_path, monkeypatch, on_sky("aws/us-east-1/us-east-1a", "aws"))
    (tmp_path / "mine").mkdir()
    made.record = replace(made.record, spec=replace(made.record.spec, workdir=str(tmp_path / "mine")))
    made.sky = Users(made)
    monkeypatch.setattr(
        daemon, "open_cloud", lambda record, store: SkyCloud(cast(Any, made.sky.beyond), record, store)
    )
    yield made
    made.daemon_dies()
    structlog.reset_defaults()
