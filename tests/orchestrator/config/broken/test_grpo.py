"""`grpo`: what TRL would refuse on a machine that is paid for, and what a run sets by itself."""

# ruff: noqa: E501  # what is printed stands here whole, to be found by searching for it

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.load import ConfigError, load_spec
from tests.generators.config_world import changed, furnish
from tests.orchestrator.config.broken.cases import DROP, GRPO, Case, check, each

BROKEN: list[Case] = [
    (
        "batch not divisible by the group",
        [("per_device_train_batch_size: 32", "per_device_train_batch_size: 1\n  gradient_accumulation_steps: 4")],
        [
            "run.yaml:11: grpo.num_generations: the generation batch, 4 = 1 x 4, is not divisible by num_generations, 8; expected per_device_train_batch_size x steps_per_generation (default gradient_accumulation_steps) to be a multiple of 8"
        ],
    ),
    (
        "batch of several processes",
        [
            ("num_generations: 8", "num_generations: 5"),
            ("  reward_funcs:", "  accelerate: {num_processes: 3}\n  reward_funcs:"),
        ],
        [
            "run.yaml:11: grpo.num_generations: the generation batch, 96 = 96 x 1, is not divisible by num_generations, 5; expected per_device_train_batch_size x steps_per_generation (default gradient_accumulation_steps) to be a multiple of 5"
        ],
    ),
    (
        "generation batch that no steps make",
        [(GRPO, "  beta: 0.02\n  generation_batch_size: 40")],
        [
            "run.yaml:15: grpo.generation_batch_size: 40 is not divisible by per_device_train_batch_size x processes, 32; expected a multiple of 32"
        ],
    ),
    (
        "both batch keys",
        [(GRPO, "  beta: 0.02\n  generation_batch_size: 32\n  steps_per_generation: 1")],
        [
            "run.yaml:16: grpo.steps_per_generation: TRL takes this or generation_batch_size, not both; remove one",
        ],
    ),
    (
        "one completion is no group",
        [("num_generations: 8", "num_generations: 1")],
        ["run.yaml:10: grpo.num_generations: expected at least 2, got 1"],
    ),
    (
        "KL limit with beta 0",
        [("beta: 0.02", "beta: 0")],
        [
            "run.yaml:14: grpo.beta: expected more than 0, as policies.kl.limit is set and TRL computes no kl at 0; remove one of the two"
        ],
    ),
    (
        "KL limit without beta",
        [("  beta: 0.02\n", "")],
        [
            "run.yaml:19: policies.kl.limit: needs grpo.beta above 0: at TRL's default of 0.0 no kl is computed; set e.g. grpo.beta: 0.02"
        ],
    ),
    (
        "save between two generations",
        [(GRPO, "  beta: 0.02\n  num_iterations: 4\n  save_steps: 10")],
        [
            "run.yaml:16: grpo.save_steps: 10 is no multiple of 4, the optimizer steps that share one generation: between them no checkpoint resumes exactly; expected e.g. 12"
        ],
    ),
    (
        "save steps as a share",
        [(GRPO, "  beta: 0.02\n  save_steps: 1.5")],
        ["run.yaml:15: grpo.save_steps: expected a whole number of steps, got 1.5"],
    ),
    (
        "key that the run sets",
        [(GRPO, "  beta: 0.02\n  output_dir: out\n  use_vllm: true")],
        [
            "run.yaml:15: grpo.output_dir: cannot be set, remove it: checkpoints go to `storage` and are restored from there",
            "run.yaml:16: grpo.use_vllm: cannot be set, remove it: completions come through the gateway",
        ],
    ),
    (
        "key that TRL has removed",
        [(GRPO, "  beta: 0.02\n  max_prompt_length: 128")],
        [
            "run.yaml:15: grpo.max_prompt_length: TRL has removed it; filter long prompts out of the dataset, and let rollout.vllm.max-model-len bound prompt and completion together"
        ],
    ),
    (
        "unknown foreign keys",
        [(GRPO, "  beta: 0.02\n  num_generation: 8"), ("max-model-len", "max-modellen")],
        [
            'run.yaml:15: grpo.num_generation: unknown key, not one of GRPOConfig\'s (TRL 1.16.0); did you mean "num_generations"?',
            'run.yaml:18: rollout.vllm.max-modellen: unknown key, not one of the flags of `vllm serve` (vLLM 0.32.0); did you mean "max-model-len"?',
        ],
    ),
    (
        "choice",
        [(GRPO, "  beta: 0.02\n  loss_type: drgrpo")],
        [
            "run.yaml:15: grpo.loss_type: expected one of bnpo, cispo, dapo, dr_grpo, grpo, luspo, sapo, vespo, got 'drgrpo'; did you mean \"dr_grpo\"?"
        ],
    ),
    (
        "evaluation without data",
        [(GRPO, "  beta: 0.02\n  eval_steps: 10")],
        [
            "run.yaml:15: grpo.eval_steps: set, but there is nothing to score; set trainer.eval_dataset or remove this key"
        ],
    ),
    (
        "one seed for all completions",
        [(GRPO, "  beta: 0.02\n  generation_kwargs:\n    seed: 1")],
        [
            "run.yaml:16: grpo.generation_kwargs.seed: each completion has a seed of its own, derived from grpo.seed; remove this one"
        ],
    ),
    (
        "evaluation in batches that hold no groups",
        [
            ("  reward_funcs:", "  eval_dataset: prompts.jsonl\n  reward_funcs:"),
            (GRPO, "  beta: 0.02\n  per_device_eval_batch_size: 4\n  eval_steps: 10"),
        ],
        [
            "run.yaml:16: grpo.per_device_eval_batch_size: the evaluation batch, 4 (grpo.per_device_eval_batch_size), is not divisible by num_generations, 8; expected a multiple of 8",
        ],
    ),
    (
        "a loss and a correction that is not for it",
        [(GRPO, f"{GRPO}\n  loss_type: vespo")],
        [
            "run.yaml:15: grpo.loss_type: vespo needs vllm_importance_sampling_mode token_truncate or token_mask, and it is sequence_mask; set one of them"
        ],
    ),
    (
        "a base model in four bits",
        [(GRPO, f"{GRPO}\n  model_init_kwargs: {{load_in_4bit: true}}")],
        [
            "run.yaml:15: grpo.model_init_kwargs: a quantised model cannot be published to rollout nodes; expected the model as it was before, with adapters (trainer.peft) to save memory"
        ],
    ),
    (
        "what a restart would not come through",
        [(GRPO, f"{GRPO}\n  ignore_data_skip: true\n  push_to_hub: true")],
        [
            "run.yaml:15: grpo.ignore_data_skip: cannot be set, remove it: a restart would train on other prompts than the next ones",
            "run.yaml:16: grpo.push_to_hub: cannot be set, remove it: weights go to `storage`; `grpo-orch checkpoints export` writes them as from_pretrained reads them, ready to be pushed",
        ],
    ),
    (
        "weights of another number",
        [(GRPO, "  beta: 0.02\n  reward_weights: [1.0, 0.5]")],
        ["run.yaml:15: grpo.reward_weights: expected one weight for each of 1 reward_funcs, got 2"],
    ),
    (
        "checkpoints as TRL counts them",
        [(GRPO, "  beta: 0.02\n  save_total_limit: 2\n  load_best_model_at_end: true\n  save_only_model: true")],
        [
            "run.yaml:15: grpo.save_total_limit: cannot be set, remove it: the machine's disk keeps none; how many the store keeps is checkpoints.keep_last",
            "run.yaml:16: grpo.load_best_model_at_end: cannot be set, remove it: the machine's disk keeps none to load; see checkpoints for those that stay",
            "run.yaml:17: grpo.save_only_model: cannot be set, remove it: such a checkpoint cannot be resumed",
        ],
    ),
]


@each(BROKEN)
def test_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[tuple[str, str]], lines: list[str]
) -> None:
    check(tmp_path, monkeypatch, changes, lines)


SHARDED = "a reference model in shards ({}) does not survive a restart; expected ZeRO stage 0 to 2, or DDP"


@pytest.mark.parametrize(
    ("trainer", "grpo", "said"),
    [
        ("accelerate: {distributed_type: MULTI_GPU, num_processes: 2}", "", None),
        ("accelerate: {distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 2}}", "", None),
        (
            "accelerate: {distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 3}}",
            "",
            SHARDED.format("trainer.accelerate.deepspeed_config, ZeRO stage 3"),
        ),
        (
            "accelerate: {distributed_type: DEEPSPEED, deepspeed_config: {deepspeed_config_file: ds.json}}",
            "",
            SHARDED.format("trainer.accelerate.deepspeed_config, ZeRO stage in a file"),
        ),
        ("accelerate: {distributed_type: FSDP, fsdp_config: {fsdp_version: 2}}", "", SHARDED.format("FSDP")),
        ("", "deepspeed: {zero_optimization: {stage: 1}}", None),
        ("", "deepspeed: {zero_optimization: {stage: 3}}", SHARDED.format("grpo.deepspeed, ZeRO stage 3")),
        (
            "peft: {r: 4}",
            "",
            "adapters are their own reference when they are taken off; remove this one, or trainer.peft",
        ),
    ],
)
def test_a_reference_that_moves_comes_through_a_restart_or_is_refused(
    trainer: str, grpo: str, said: str | None, tmp_path: Path
) -> None:
    run_yaml = furnish(tmp_path)
    more = "".join(f"\n  {line}" for line in ("sync_ref_model: true", grpo) if line)
    changes = [
        (GRPO, f"{GRPO}{more}"),
        ("  reward_funcs", f"  {trainer}\n  reward_funcs" if trainer else "  reward_funcs"),
    ]
    run_yaml.write_text(changed(*changes, (DROP, "")))
    if said is None:
        load_spec(run_yaml)
        return
    with pytest.raises(ConfigError) as caught:
        load_spec(run_yaml)
    assert f"grpo.sync_ref_model: {said}" in str(caught.value)
