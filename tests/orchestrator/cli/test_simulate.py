"""`simulate`, as a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_orch.orchestrator.cli import simulate
from grpo_orch.orchestrator.simulate.scenarios import ScenarioResult
from grpo_orch.orchestrator.simulate.simulation import InvariantViolated
from tests.rigs.command_line import Cli

RUN = """
name: sim
storage: {storage}
trainer: {{model: m/m, dataset: d/d, reward_funcs: trl.rewards.think_format_reward}}
grpo: {{max_steps: 10, per_device_train_batch_size: 8, num_generations: 8}}
rollout: {{replicas: 2}}
"""


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(RUN.format(storage=tmp_path / "store"))
    return file


def test_a_run_is_simulated_for_programs(run_yaml: Path, monkeypatch: pytest.MonkeyPatch, grpo_orch: Cli) -> None:
    monkeypatch.setattr(simulate, "HOURS", 1.0)
    words = "--seeds", "1", "--climate", "storms", "-o", "json"
    found = grpo_orch("simulate", str(run_yaml), *words)
    assert found.code == 0, found
    told = json.loads(found.out)
    assert told["market"] == "storms"
    assert set(told["outcomes"]) == {"this run", "on-demand"}
    assert told["outcomes"]["this run"]["steps"] > 0
    assert told["steps_per_usd_to_on_demand"] > 0


def test_a_broken_promise_names_the_command_that_replays_it(
    run_yaml: Path, monkeypatch: pytest.MonkeyPatch, grpo_orch: Cli
) -> None:
    def broken(seed: int, *_: object, **__: object) -> ScenarioResult:
        raise InvariantViolated(f"seed {seed}: two trainers act")

    monkeypatch.setattr(simulate, "run_scenario", broken)
    found = grpo_orch("simulate", str(run_yaml), "--seed", "41", "--climate", "scarce")
    assert f"grpo-orch simulate {run_yaml} --climate scarce --seeds 1 --seed 41" in found.err
    assert found.code == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--climate", "balmy"], "expected one of calm, daily"),
        (["--climate", "calm", "--trace", "t"], "mutually exclusive"),
        (["--seeds", "0"], "above 0"),
        (["--trace", "missing.json"], "missing.json"),
    ],
)
def test_a_mistake_is_a_line(run_yaml: Path, arguments: list[str], told: str, grpo_orch: Cli) -> None:
    assert told in grpo_orch("simulate", str(run_yaml), *arguments).line
