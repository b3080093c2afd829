"""What these tests have in common."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import structlog

from checkpoint.records import documents
from checkpoint.records.documents import RunRecord
from checkpoint.store.run_store import OPTIONS_ENV, Store
from orchestrator import clouds
from orchestrator.cli import remote
from orchestrator.clouds.sky import cloud as sky_cloud
from orchestrator.clouds.sky import watch
from orchestrator.clouds.sky.cloud import SkyCloud
from orchestrator.control import daemon
from tests.budget import HANG_S
from tests.orchestrator.clouds.sky.remote.world import RUN_ID, Users, World
from tests.stand_ins.world import spec


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(OPTIONS_ENV, "")  # and put back: the command line sets it
    for module, name, value_s in (
        (watch, "LOOK_EVERY_S", 0.01), (watch, "READ_EVERY_S", 0.01), (sky_cloud, "REGION_WAIT_S", 0.05),
        (remote, "POLL_S", 0.01), (remote, "ENDED_EVERY_S", 0.1), (remote, "DAEMON_TIMEOUT_S", HANG_S),
        (daemon, "TROUBLE_WAIT_S", 0.01),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value_s)
    folder = tmp_path / "mine"
    folder.mkdir()
    trainer = replace(spec().trainer, resources={"infra": "aws/us-east-1/us-east-1a", "accelerators": "H100:8"})
    rollout = replace(spec().rollout, resources={"infra": "aws"})
    store = Store((tmp_path / "store").as_uri())
    run = replace(spec(), cloud="sky", storage=store.url, workdir=str(folder), trainer=trainer, rollout=rollout)
    made = World(store, Users(store), RunRecord(documents.SCHEMA, RUN_ID, time.time(), run))
    monkeypatch.setattr(clouds, "_open_skypilot", lambda *_: made.sky)
    # What the daemon says is said on the other machine.
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    monkeypatch.setattr(structlog, "configure", lambda **_: None)
    # The daemon in its thread is on the other machine.
    monkeypatch.setattr(
        daemon, "open_cloud", lambda record, store: SkyCloud(cast(Any, made.sky.beyond), record, store)
    )
    yield made
    made.sky.daemon_dies()
    structlog.reset_defaults()
