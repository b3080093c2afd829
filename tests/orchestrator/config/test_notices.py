"""What `validate` says of a file that can be run: which line, why, and what to do; and the same for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.load import load
from policies.detect.divergence import TYPICAL_DELAY_POINTS as DELAY
from tests.generators.config_world import VALID, changed, furnish
from tests.rigs.command_line import Cli

NO_LIMIT = ("{limit: 0.5}", "{}")
BETA = "  beta: 0.02\n"
REWARDS = "  reward_funcs: [rewards.digit_share]\n"
MERGED = "each step publishes whole merged weights, not the adapter alone"
NO_KL = (
    "no KL is logged, so divergence is judged by gradient norm, entropy and reward alone; set e.g. grpo.beta: 0.02"
)
IDLE = (
    "each node has 8 GPUs and each of its engines takes 3, so 2 would be idle; "
    "set rollout.vllm.tensor-parallel-size to a divisor of 8, or have nodes of 3"
)
EXACT = "with recovery: exact no completion may differ from what a rollout node would make"
TOO_LATE = "without a node a request fails before the trainer generates (own_generation_after_s: 300)"
UNUSED = "not used: with replicas: 0 the trainer generates, without vLLM"
DROP = VALID[VALID.index("rehearse:") :]
SAME = (
    "a rollback changes the sampling seeds alone, and what diverged once may do so again; "
    "set a factor, or skip_prompts: true"
)
NOTHING = "{on_rollback: {beta_factor: 1, epsilon_factor: 1, learning_rate_factor: 1, skip_prompts: false}}"
REGIONS = (
    "of aws/r1, aws/r2 a run is in one, the trainer's: "
    "its nodes talk over private addresses, which do not reach another region"
)
NETWORKS = (
    "azure: SkyPilot makes a network for each machine, and nodes do not reach the trainer in another; "
    "name one for all in ~/.sky/config.yaml: azure.vpc_name"
)
WITHOUT_KL = "{on_rollback: {epsilon_factor: 1, learning_rate_factor: 1, skip_prompts: false}}"


def late(logging_steps: int, checkpoints: int = 0) -> str:
    """What is said of a trip that comes as late as is typical, where so many checkpoints are lost, if many are."""
    steps = DELAY * logging_steps
    return (
        f"a divergence trips about {DELAY} logged points after its first bad update, here {steps} steps"
        + (f" or {checkpoints} checkpoints, which a rollback throws away" if checkpoints else "")
        + ("; a lower one loses less" if logging_steps > 1 else "")
    )


@pytest.mark.parametrize(
    ("changes", "notices"),
    [
        ([], []),
        ([(BETA, ""), NO_LIMIT], [f"run.yaml:7: grpo: {NO_KL}"]),
        ([(BETA, "  beta: 0.0\n"), NO_LIMIT], [f"run.yaml:14: grpo.beta: {NO_KL}"]),
        ([(BETA, "  beta: 1e-9\n"), NO_LIMIT], []),
        (
            [
                (DROP, "cloud: sky\n"),
                ("storage: ./run", "storage: s3://b/run"),
                ("  replicas: 2", "  replicas: 2\n  resources:\n    any_of: [{infra: aws/r1}, {infra: aws/r2/z}]"),
            ],
            [f"run.yaml:17: rollout.resources: {REGIONS}"],
        ),
        (
            [
                (DROP, "cloud: sky\n"),
                ("storage: ./run", "storage: s3://b/run"),
                ("  replicas: 2", "  replicas: 2\n  resources: {any_of: [{infra: Azure/eastus}]}"),
            ],
            [f"run.yaml:17: rollout.resources: {NETWORKS}"],
        ),
        ([("{limit: 0.5}", NOTHING)], [f"run.yaml:20: policies.kl.on_rollback: {SAME}"]),
        ([("{limit: 0.5}", NOTHING.replace("skip_prompts: false", "skip_prompts: true"))], []),
        ([("{limit: 0.5}", NOTHING.replace("beta_factor: 1", "beta_factor: 1.1"))], []),
        ([("{limit: 0.5}", NOTHING.replace("{on", "{action: pause, on"))], []),
        # A factor for the KL term changes nothing where there is none.
        (
            [(BETA, ""), ("{limit: 0.5}", WITHOUT_KL)],
            [f"run.yaml:7: grpo: {NO_KL}", f"run.yaml:19: policies.kl.on_rollback: {SAME}"],
        ),
        (
            [
                ("  replicas: 2", "  replicas: 2\n  resources: {accelerators: 'H100:8'}"),
                ("vllm: {dtype", "vllm: {tensor-parallel-size: 3, dtype"),
            ],
            [f"run.yaml:17: rollout.resources.accelerators: {IDLE}"],
        ),
        ([("  replicas: 2", "  replicas: 2\n  resources: {accelerators: 'H100:8'}")], []),
        (
            [("replicas: 2", "replicas: 0"), (DROP, "")],
            [f"run.yaml:17: rollout.vllm: {UNUSED}", f"run.yaml:18: rollout.env: {UNUSED}"],
        ),
        ([("  replicas: 2", "  replicas: 2\n  own_generation_after_s: 60")], []),
        (
            [("  replicas: 2", "  replicas: 2\n  own_generation_after_s: 60\n  recovery: exact")],
            [f"run.yaml:17: rollout.own_generation_after_s: not used: {EXACT}"],
        ),
        ([("  replicas: 2", "  replicas: 2\n  recovery: exact")], []),
        (
            [("  replicas: 2", "  replicas: 2\n  deadline_s: 300")],
            [f"run.yaml:17: rollout.deadline_s: {TOO_LATE}"],
        ),
        ([(BETA, f"{BETA}  logging_steps: 1\n")], []),
        ([(BETA, f"{BETA}  logging_steps: 2\n")], [f"run.yaml:15: grpo.logging_steps: {late(2)}"]),
        ([(BETA, f"{BETA}  save_steps: {DELAY}\n")], []),
        ([(BETA, f"{BETA}  save_steps: 1\n")], [f"run.yaml:7: grpo: {late(1, DELAY)}"]),
        (
            [(BETA, f"{BETA}  save_steps: {DELAY}\n  logging_steps: 4\n")],
            [f"run.yaml:16: grpo.logging_steps: {late(4)}"],
        ),
        (
            [(BETA, f"{BETA}  save_steps: {DELAY}\n  logging_steps: 5\n")],
            [f"run.yaml:16: grpo.logging_steps: {late(5, 5)}"],
        ),
        ([(REWARDS, f"{REWARDS}  peft: {{r: 16, target_modules: all-linear}}\n")], []),
        (
            [(REWARDS, f"{REWARDS}  peft: {{r: 16, use_dora: true}}\n")],
            [f"run.yaml:7: trainer.peft: {MERGED}: vLLM does not apply adapters with trainer.peft.use_dora"],
        ),
    ],
)
def test_notices(tmp_path: Path, changes: list[tuple[str, str]], notices: list[str]) -> None:
    run_yaml = furnish(tmp_path)
    run_yaml.write_text(changed(*changes))
    assert [str(notice).removeprefix(f"{tmp_path}/") for notice in load(run_yaml).notices] == notices


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with a run.yaml of which there is something to say."""
    run_yaml = furnish(tmp_path)
    run_yaml.write_text(changed((BETA, ""), NO_LIMIT))
    monkeypatch.chdir(tmp_path)
    return run_yaml


def test_validate_prints_notices_and_is_content(here: Path, grpo_orch: Cli) -> None:
    assert here.exists()
    assert grpo_orch("validate", "run.yaml") == (
        0,
        f"run.yaml: demo is valid\nnotice: run.yaml:7: grpo: {NO_KL}\n",
        "",
    )


def test_validate_for_programs(here: Path, grpo_orch: Cli) -> None:
    def said() -> tuple[int, dict[str, Any], str]:
        code, out, err = grpo_orch("validate", "run.yaml", "-o", "json")
        return code, json.loads(out), err

    notice = {"file": "run.yaml", "line": 7, "key": "grpo", "message": NO_KL}
    valid = {"file": "run.yaml", "name": "demo", "valid": True, "problems": [], "notices": [notice]}
    assert said() == (0, valid, "")
    here.write_text(changed(("{limit: 0.5}", "{limit: -1}")))
    where = {"file": "run.yaml", "line": 20, "key": "policies.kl.limit"}
    problem = where | {"message": "expected more than 0, got -1"}
    invalid = {"file": "run.yaml", "name": None, "valid": False, "problems": [problem], "notices": []}
    assert said() == (2, invalid, "")
    here.unlink()
    code, document, err = said()
    assert (code, document["valid"], document["problems"][0]["line"], err) == (2, False, None, "")
