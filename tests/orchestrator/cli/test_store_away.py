"""Commands whose store is away, or refuses: one line that says why, whichever command it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_orch.checkpoint.store.run_store import OPTIONS_ENV
from grpo_orch.orchestrator.cli import target
from grpo_orch.policies.model import exit_codes
from tests.rigs.command_line import Cli
from tests.rigs.store.fault_proxy import Answer, Away, Fault, FaultProxy
from tests.rigs.store.server import S3Server

COMMANDS = ["status", "down", "resume"]
ROTATED = Answer(403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records.")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path))
    monkeypatch.setattr(target, "RETRY_S", 0.3)  # some tries, none of which is told of


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Away(), "Connection refused, connecting to {endpoint}; check the endpoint and this machine's network"),
        (ROTATED, "403 InvalidAccessKeyId: {0.message}; check the access key and its secret"),
        (Answer(503, "SlowDown"), "503 SlowDown: told so by the test"),
    ],
    ids=["away", "rotated", "busy"],
)
def test_unreachable_store_is_one_line(
    command: str,
    fault: Fault,
    why: str,
    proxy: FaultProxy,
    moto: S3Server,
    grpo_orch: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(OPTIONS_ENV, json.dumps(moto.at(proxy.endpoint).options()))
    url = moto.url("away")
    proxy.inject(fault)
    answer = grpo_orch(command, url)
    told = f"read run.json in {url}: {why.format(fault, endpoint=proxy.endpoint)}"
    assert (answer.code, answer.line) == (exit_codes.FAILED, told)
    proxy.heal()


def test_unknown_name_is_reported(moto: S3Server, grpo_orch: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = "http://no-such-host.invalid"
    monkeypatch.setenv(OPTIONS_ENV, json.dumps(moto.at(elsewhere).options()))
    answer = grpo_orch("status", moto.url("away"))
    assert answer.code == exit_codes.FAILED
    assert f", connecting to {elsewhere}; check the endpoint" in answer.line
