"""`rollout`: vLLM's flags, replicas, and the GPUs that there are for them."""

# ruff: noqa: E501  # what is printed stands here whole, to be found by searching for it

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.load import ConfigError, load
from policies.model.gpus import DriverFailed
from tests.generators.config_world import changed, furnish
from tests.orchestrator.config.broken.cases import DROP, GRPO, Case, check, each

BROKEN: list[Case] = [
    (
        "more of a GPU's memory than there is",
        [("enforce-eager: true", "gpu-memory-utilization: 1.5")],
        ["run.yaml:17: rollout.vllm.gpu-memory-utilization: expected at most 1, got 1.5"],
    ),
    (
        "none of a GPU's memory",
        [("enforce-eager: true", "gpu_memory_utilization: 0")],
        ["run.yaml:17: rollout.vllm.gpu_memory_utilization: expected more than 0, got 0"],
    ),
    (
        "vLLM flags that the node sets, in any spelling",
        [("max-model-len: 256", "api_key: x, host: 0.0.0.0")],
        [
            "run.yaml:17: rollout.vllm.api_key: cannot be set, remove it: every node is given its own, from the run's own secret",
            "run.yaml:17: rollout.vllm.host: cannot be set, remove it: every node is given its own",
        ],
    ),
    (
        "policies older than two windows",
        [("replicas: 2", "replicas: 2\n  max_staleness: 3")],
        ["run.yaml:17: rollout.max_staleness: expected at most 2, got 3"],
    ),
    (
        "windows ahead whose prompts are not known",
        [
            ("replicas: 2", "replicas: 2\n  max_staleness: 1"),
            ("  reward_funcs", "  rollout_func: rewards.digit_share\n  reward_funcs"),
        ],
        [
            "run.yaml:18: rollout.max_staleness: does not work with trainer.rollout_func, whose prompts are not known before"
        ],
    ),
    (
        "windows ahead that are not corrected",
        [
            ("replicas: 2", "replicas: 2\n  max_staleness: 1"),
            (GRPO, f"{GRPO}\n  vllm_importance_sampling_correction: false"),
        ],
        [
            "run.yaml:18: rollout.max_staleness: needs grpo.vllm_importance_sampling_correction: without it completions of an older policy count as the present one's"
        ],
    ),
    (
        "one flag in two spellings",
        [("max-model-len: 256", "max-model-len: 256, max_model_len: 512")],
        ["run.yaml:17: rollout.vllm.max_model_len: given twice, in two spellings; keep max-model-len"],
    ),
    (
        "no room for a prompt",
        [("max_completion_length: 16", "max_completion_length: 256")],
        [
            "run.yaml:17: rollout.vllm.max-model-len: 256 leaves no room for a prompt: grpo.max_completion_length is 256; expected more than that"
        ],
    ),
    (
        "guessed tokens, and completions that go on elsewhere",
        [("max-model-len: 256", "max-model-len: 256, spec-method: ngram")],
        [
            "run.yaml:17: rollout.vllm.spec-method: speculative decoding draws by what it guessed, so no completion can go on at another node; expected rollout.recovery: exact with it"
        ],
    ),
    (
        "resources",
        [
            (
                "  replicas: 2",
                "  replicas: 2\n  resources:\n    accelerator: L4\n    ports: 8000\n    any_of:\n      - {zon: a}",
            )
        ],
        [
            'run.yaml:18: rollout.resources.accelerator: unknown key, not one of SkyPilot\'s resources keys (0.14.1); did you mean "accelerators"?',
            "run.yaml:19: rollout.resources.ports: ports stay closed: nodes reach each other without; leave it out",
            'run.yaml:21: rollout.resources.any_of[0].zon: unknown key, not one of SkyPilot\'s resources keys (0.14.1); did you mean "zone"?',
        ],
    ),
    (
        "an engine that its node cannot hold",
        [
            (
                "  replicas: 2",
                "  replicas: 2\n  resources:\n    accelerators: H100:2",
            ),
            ("max-model-len: 256", "max-model-len: 256, tensor-parallel-size: 4"),
        ],
        [
            "run.yaml:18: rollout.resources.accelerators: a node has 2 GPUs, and with these rollout.vllm flags its engine takes 4; expected at least as many",
        ],
    ),
    (
        "GPUs divided by hand",
        [("OMP_NUM_THREADS: 1", "CUDA_VISIBLE_DEVICES: 1")],
        [
            "run.yaml:18: rollout.env.CUDA_VISIBLE_DEVICES: each node is given its own GPUs; remove this, and say how many in resources.accelerators",
        ],
    ),
    (
        "replicas",
        [("replicas: 2", "replicas: {min: 4, max: 3}")],
        ["run.yaml:16: rollout.replicas.min: 4 is more than max, 3; expected min <= max"],
    ),
    (
        "fewer replicas than none",
        [("replicas: 2", "replicas: -1"), (DROP, "")],
        ["run.yaml:16: rollout.replicas: expected at least 0, got -1"],
    ),
    (
        "perhaps no replica",
        [("replicas: 2", "replicas: {min: 0, max: 2}")],
        [
            "run.yaml:16: rollout.replicas.min: a run with rollout nodes needs one at least; expected 1 or more, or replicas: 0"
        ],
    ),
    (
        "no nodes, and what only they do",
        [
            ("replicas: 2", "replicas: 0"),
            (GRPO, f"{GRPO}\n  generation_kwargs: {{best_of: 2}}"),
            ("  reward_funcs", "  accelerate: {num_processes: 2, fsdp_config: {fsdp_version: 2}}\n  reward_funcs"),
        ],
        [
            "run.yaml:6: trainer.accelerate.num_processes: with rollout.replicas: 0 one process trains and generates; expected 1, got 2",
            "run.yaml:6: trainer.accelerate.fsdp_config: with rollout.replicas: 0 one process holds the whole model to generate; remove it",
            "run.yaml:16: grpo.generation_kwargs: vLLM's, and with rollout.replicas: 0 the trainer generates; remove it",
            "run.yaml:25: rehearse.faults[0].kill: there are no rollout nodes: rollout.replicas is 0",
            "run.yaml:26: rehearse.faults[1].preempt: there are no rollout nodes: rollout.replicas is 0",
            "run.yaml:28: rehearse.faults[3].no_capacity: there are no rollout nodes: rollout.replicas is 0",
        ],
    ),
    (
        "windows ahead without nodes",
        [("replicas: 2", "replicas: 0\n  max_staleness: 1"), (DROP, "")],
        [
            "run.yaml:17: rollout.max_staleness: needs rollout nodes: with replicas: 0 the trainer generates with its present weights"
        ],
    ),
    (
        "no nodes, and more GPUs than generate",
        [
            ("replicas: 2", "replicas: 0"),
            (GRPO, f"{GRPO}\n  fsdp: full_shard"),
            ("  reward_funcs", "  resources: {accelerators: 'H100:2'}\n  reward_funcs"),
            (DROP, ""),
        ],
        [
            "run.yaml:6: trainer.resources.accelerators: with rollout.replicas: 0 one process trains and generates; expected 1, got 2",
            "run.yaml:16: grpo.fsdp: with rollout.replicas: 0 one process holds the whole model to generate; remove it",
        ],
    ),
    (
        "replicas of another type",
        [("replicas: 2", "replicas: two")],
        ["run.yaml:16: rollout.replicas: expected a whole number or a mapping with the keys min, max, got 'two'"],
    ),
    (
        "environment",
        [("OMP_NUM_THREADS: 1", "OMP_NUM_THREADS: [1]")],
        ["run.yaml:18: rollout.env.OMP_NUM_THREADS: expected text, got a list"],
    ),
    (
        "names that no environment can have",
        [("OMP_NUM_THREADS: 1", '"OMP_NUM_THREADS=1": x, "": y')],
        [
            "run.yaml:18: rollout.env.OMP_NUM_THREADS=1: expected the name of an environment variable, without any =",
            "run.yaml:18: rollout.env.: expected the name of an environment variable, without any =",
        ],
    ),
]


@each(BROKEN)
def test_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[tuple[str, str]], lines: list[str]
) -> None:
    check(tmp_path, monkeypatch, changes, lines)


@pytest.mark.parametrize(
    ("here", "rollout", "said"),
    [
        (0, "replicas: 2", ""),  # a machine without any
        (3, "replicas: 2", ""),
        (2, "replicas: {min: 1, max: 8}", ""),
        (
            2,
            "replicas: 2",
            "this machine has 2 GPUs, and the run takes 3: the trainer 1 and 2 rollout nodes 1 each",
        ),
        (1, "replicas: 1", "this machine has 1 GPU, and the run takes 2: the trainer 1 and 1 rollout node 1 each"),
        (
            4,
            "replicas: 1\n  resources: {accelerators: 'L4:4'}",
            "this machine has 4 GPUs, and the run takes 5: the trainer 1 and 1 rollout node 4 each",
        ),
    ],
)
def test_more_nodes_than_this_machine_has_gpus_for(here: int, rollout: str, said: str, tmp_path: Path) -> None:
    run_yaml = furnish(tmp_path)
    run_yaml.write_text(changed(("replicas: 2", rollout), (DROP, "")))
    if not said:
        load(run_yaml, lambda: here)
        return
    with pytest.raises(ConfigError) as caught:
        load(run_yaml, lambda: here)
    where = "run.yaml:16: rollout.replicas"
    assert str(caught.value).endswith(f"{where}: {said}; see `resources.accelerators` of both")


@pytest.mark.parametrize("asks", [True, False])
def test_a_driver_that_fails_is_told_where_it_matters(asks: bool, tmp_path: Path) -> None:
    def fails() -> int:
        raise DriverFailed("nvidia-smi ends with exit code 9: no driver")

    run_yaml = furnish(tmp_path)
    resources = "replicas: 1\n  resources: {accelerators: 'L4:4'}" if asks else "replicas: 1"
    run_yaml.write_text(changed(("replicas: 2", resources), (DROP, "")))
    if not asks:
        said = [one.message for one in load(run_yaml, fails).notices]
        assert "nvidia-smi ends with exit code 9: no driver, so this machine counts as one without GPUs" in said
        return
    with pytest.raises(
        ConfigError, match=r"17: rollout\.resources\.accelerators: nvidia-smi ends with exit code 9"
    ):
        load(run_yaml, fails)


def test_a_cloud_has_the_gpus_that_this_machine_lacks(tmp_path: Path) -> None:
    run_yaml = furnish(tmp_path)
    run_yaml.write_text(changed(("storage: ./run", "storage: s3://runs/demo\ncloud: sky"), (DROP, "")))
    load(run_yaml, lambda: 1)
