"""What `grpo-orch doctor` says is there and missing, and whether the run could start."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.cli import doctor
from grpo_orch.orchestrator.cli.doctor import (
    INSTALL,
    Finding,
    SkyPilotLike,
    examine,
    is_usable,
    temporary_credentials,
)
from grpo_orch.orchestrator.cli.options import console
from grpo_orch.orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from grpo_orch.orchestrator.clouds.sky.records import ApiServer, CloudCheck, SkyOffer
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.vocabulary import Refusal
from tests.generators import config_world
from tests.rigs.command_line import Cli
from tests.stand_ins.world import spec

SPOT = SkyOffer("aws/us-east-1/us-east-1b", "p5.48xlarge", "H100:8", True, 21.5)
DEARER = replace(SPOT, infra="aws/us-west-2/us-west-2a", price_usd_per_h=23.22)
ON_DEMAND = replace(SPOT, infra="aws/us-east-1", spot=False, price_usd_per_h=55.04)


@dataclass
class SkyPilotStandIn:
    """A SkyPilot that knows what it was told."""

    machines: list[SkyOffer] = field(default_factory=lambda: [SPOT, DEARER, ON_DEMAND])
    no_quota: tuple[SkyOffer, ...] = ()
    away: bool = False

    def server(self) -> ApiServer:
        if self.away:
            raise CloudUnavailable("the API server at https://sky.example does not answer; see `curl ...`")
        return ApiServer("http://127.0.0.1:46580", "0.14.1", local=True)

    def clouds(self) -> list[CloudCheck]:
        return [
            CloudCheck("aws", enabled=True, reason=""),
            CloudCheck("gcp", enabled=False, reason="GCP tools are not installed."),
        ]

    def offers(self, resources: dict[str, Any], *, spot: bool) -> list[SkyOffer]:
        found = [offer for offer in self.machines if offer.spot == spot]
        if not found:
            raise CloudRefused(Refusal.QUOTA, f"no enabled cloud (aws) has machines for {resources}; name another")
        return found

    def has_quota(self, offer: SkyOffer) -> bool:
        return offer not in self.no_quota


def on_cloud() -> RunSpec:
    """A run with its trainer on demand and its rollouts on spot, as is the default."""
    return replace(spec(), cloud="sky")


def look(run: RunSpec | None, skypilot: SkyPilotLike, version: str | None = "0.14.1") -> dict[str, Finding]:
    return {finding.check: finding for finding in examine(run, version, lambda: skypilot)}


@pytest.fixture(autouse=True)
def no_node_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_ORCH_NODE_PYTHON", "/no/such/python")


def test_expiring_credentials_are_reported() -> None:
    store = Store("memory://session")
    assert list(temporary_credentials(store)) == []
    store.options = {"aws_access_key_id": "k", "AWS_SESSION_TOKEN": "secret"}
    (told,) = temporary_credentials(store)
    assert told.warning
    assert told.details.startswith(
        "storage.options.AWS_SESSION_TOKEN: credentials with a session token expire on all machines together"
    )
    assert "secret" not in told.details


def test_a_run_on_a_cloud_that_has_all_it_needs() -> None:
    found = look(on_cloud(), SkyPilotStandIn())
    assert is_usable(list(found.values()))
    assert found["SkyPilot"].details == "0.14.1"
    assert found["API server"].details == "http://127.0.0.1:46580, version 0.14.1"
    assert found["cloud gcp"] == Finding("cloud gcp", False, False, "GCP tools are not installed.", machines=True)
    assert {what for what, finding in found.items() if finding.needed} == {
        "SkyPilot",
        "API server",
        "trainer on demand",
        "rollout spot",
    }
    assert found["trainer on demand"].details == "aws/us-east-1 p5.48xlarge H100:8 at 55.04 $/h"
    assert found["rollout spot"].details == (
        "aws/us-east-1/us-east-1b p5.48xlarge H100:8 at 21.50 $/h; 2 offers, up to 23.22 $/h"
    )


@pytest.mark.parametrize(
    ("skypilot", "missing", "told"),
    [
        (SkyPilotStandIn(machines=[ON_DEMAND]), "rollout spot", "no enabled cloud (aws) has machines"),
        (SkyPilotStandIn(machines=[SPOT]), "trainer on demand", "no enabled cloud (aws) has machines"),
        (
            SkyPilotStandIn(no_quota=(SPOT, DEARER)),
            "rollout spot",
            "p5.48xlarge spot is zero in aws/us-east-1, aws/us-west-2",
        ),
        (SkyPilotStandIn(away=True), "API server", "does not answer"),
    ],
)
def test_a_run_on_a_cloud_that_lacks_something(skypilot: SkyPilotLike, missing: str, told: str) -> None:
    found = look(on_cloud(), skypilot)
    assert not is_usable(list(found.values()))
    assert [what for what, finding in found.items() if finding.needed and not finding.ok] == [missing]
    assert told in found[missing].details


def test_a_market_that_the_run_does_not_use_may_be_sold_out() -> None:
    skypilot = SkyPilotStandIn(machines=[SPOT, ON_DEMAND], no_quota=(ON_DEMAND,))
    always_spot = replace(on_cloud(), trainer=replace(on_cloud().trainer, resources={"use_spot": True}))
    found = look(always_spot, skypilot)
    assert not found["trainer on demand"].ok
    assert is_usable(list(found.values()))


def test_next_place_is_offered_if_cheapest_has_no_quota() -> None:
    told = look(on_cloud(), SkyPilotStandIn(no_quota=(SPOT,)))["rollout spot"].details
    assert told.startswith("aws/us-west-2/us-west-2a p5.48xlarge H100:8 at 23.22 $/h")


def test_missing_skypilot_gives_install_command() -> None:
    found = look(on_cloud(), SkyPilotStandIn(), version=None)
    assert found["SkyPilot"] == Finding("SkyPilot", False, True, INSTALL)
    assert not is_usable(list(found.values()))


def test_local_run_contacts_no_cloud() -> None:
    def opened() -> SkyPilotLike:
        raise AssertionError("SkyPilot was opened")

    found = {finding.check: finding for finding in examine(spec(), "0.14.1", opened)}
    assert set(found) == {"SkyPilot", "node environment"}
    assert "/no/such/python" in found["node environment"].details
    assert not is_usable(list(found.values()))


def test_run_yaml_of_the_current_folder_is_checked(
    run_yaml: Path, monkeypatch: pytest.MonkeyPatch, grpo_orch: Cli
) -> None:
    """A local run needs no cloud: those that are not set up are not listed."""
    monkeypatch.chdir(run_yaml.parent)
    monkeypatch.setattr(doctor, "skypilot_version", lambda: "0.14.1")
    monkeypatch.setattr(doctor, "open_skypilot", SkyPilotStandIn)
    found = json.loads(grpo_orch("doctor", "-o", "json").out)["findings"]
    assert {finding["check"] for finding in found} == {"node environment", "SkyPilot", "store"}


def test_one_usable_cloud_suffices_without_a_run() -> None:
    assert is_usable(list(look(None, SkyPilotStandIn()).values()))
    assert not is_usable(list(look(None, SkyPilotStandIn(), version=None).values()))
    assert not is_usable(list(look(None, SkyPilotStandIn(away=True)).values()))


@pytest.fixture
def run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local run's file, with a node environment on this machine."""
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GRPO_ORCH_NODE_PYTHON", sys.executable)
    return config_world.furnish(tmp_path)


def test_the_command_prints_a_table_and_its_twin(run_yaml: Path, grpo_orch: Cli) -> None:
    told = grpo_orch("doctor", str(run_yaml), "-o", "json")
    assert told.code == 0
    document = json.loads(told.out)
    assert document["usable"] is True
    found = {finding["check"]: finding for finding in document["findings"]}
    assert found["store"]["ok"]
    assert found["node environment"] == {
        "check": "node environment",
        "ok": True,
        "needed": True,
        "details": sys.executable,
        "warning": False,
        "machines": True,
    }
    rows = [line.split() for line in grpo_orch("doctor", str(run_yaml)).out.splitlines()]
    assert ["OK", "node", "environment", sys.executable] in rows


def test_doctor_fails_for_missing_needs_of_the_run(run_yaml: Path, grpo_orch: Cli) -> None:
    (run_yaml.parent / "run").write_text("in the store's place")
    told = grpo_orch("doctor", str(run_yaml))
    assert told.code == 1
    assert told.err == "missing: store\n"
    assert "missing" in told.out


def test_missing_folder_is_reported_and_not_created(run_yaml: Path, grpo_orch: Cli) -> None:
    """It may be misspelt."""
    there = sorted(path.name for path in run_yaml.parent.iterdir())
    told = grpo_orch("doctor", str(run_yaml), "-o", "json")
    found = next(one for one in json.loads(told.out)["findings"] if one["check"] == "store")
    url = (run_yaml.parent / "run").as_uri()
    assert (told.code, found["ok"]) == (0, True)
    assert found["details"] == f"{url} does not exist yet; `up` creates and tests it"
    assert sorted(path.name for path in run_yaml.parent.iterdir()) == there


def test_remedies_are_printed_in_full(
    run_yaml: Path, grpo_orch: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of what a run does not need: the first `doctor` of a newcomer has no run."""
    monkeypatch.setattr(doctor, "skypilot_version", lambda: None)
    lines = grpo_orch("doctor", str(run_yaml)).out.splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines if "SkyPilot" in line] == [INSTALL]
    monkeypatch.setattr(console, "width", 60)
    doctor.print_findings(
        [Finding("cloud gcp", False, False, "x" * 100), Finding("SkyPilot", False, False, INSTALL)]
    )
    cut, whole = capsys.readouterr().out.splitlines()
    assert len(cut) == 60
    assert whole.endswith(INSTALL)
