"""TRL's settings, two steps with each: it trains, and the setting does something, or leaves the weights alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from grpo_orch.tasks.machine.spooling import remove_spool
from tests.node.trainer.rig import Rig, open_rig

# The second step is off the policy that its completions are of, so that ratios and clipping count.
BASE: dict[str, Any] = {
    "max_steps": 2,
    "num_iterations": 2,
    "save_steps": 100,
    "loss_type": "grpo",
    "lr_scheduler_type": "constant",
    "epsilon": 0.02,
    "beta": 0.2,
}

COMPLETIONS = 8  # a step

CHANGES: list[dict[str, Any]] = [
    {"loss_type": "bnpo"},
    {"mask_truncated_completions": True},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"loss_type": "sapo", "sapo_temperature_neg": 1.5, "sapo_temperature_pos": 0.5},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {
        "loss_type": "vespo",
        "vllm_importance_sampling_mode": "token_truncate",
        "vespo_k_pos": 1.5,
        "vespo_lambda_pos": 2.5,
        "vespo_k_neg": 2.5,
        "vespo_lambda_neg": 1.5,
    },
    {"importance_sampling_level": "sequence"},
    {"epsilon_high": 0.5},
    {"delta": 0.5},
    {"top_entropy_quantile": 0.2},
    {"off_policy_mask_threshold": 1e-4, "vllm_importance_sampling_correction": False},
    {"use_bias_correction_kl": False},
    {"entropy_coef": 0.1},
    {
        "use_adaptive_entropy": True,
        "entropy_coef": 0.1,
        "entropy_coef_min": 0.05,
        "entropy_coef_max": 0.5,
        "entropy_coef_delta": 0.1,
        "entropy_target": 100.0,
    },
    {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 0.9},
    {"vllm_importance_sampling_clip_min": 1.5},
    {"weight_decay": 0.5},
    {"adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-3},
    {"optim": "adafactor"},
    {"optim": "sgd", "learning_rate": 1.0},
    {"optim": "rmsprop"},
    {"optim": "adagrad"},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.001}, "warmup_steps": 1},
    {"neftune_noise_alpha": 5.0},
    {"model_init_kwargs": {"dtype": "bfloat16", "attn_implementation": "eager"}},
]
LEAVES: list[dict[str, Any]] = [
    {
        **{"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        **{"cast_lm_head_to_fp32": True, "disable_dropout": True, "trust_remote_code": True, "use_cache": False},
        **{"label_smoothing_factor": 0.1, "label_names": ["prompt"], "prediction_loss_only": True},
    },
    {
        **{"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 2},
        **{"dataloader_pin_memory": False, "dataloader_drop_last": True},
        **{"include_num_input_tokens_seen": "all", "torch_empty_cache_steps": 1, "logging_first_step": True},
        **{"logging_nan_inf_filter": False, "log_level": "info", "disable_tqdm": False},
        **{"log_completions": True, "log_unique_prompts": True, "num_completions_to_print": 1},
    },
]


def train(
    folder: Path, chatty: Path, grpo: dict[str, Any], **spec: Any
) -> tuple[list[dict[str, Any]], torch.Tensor]:
    """What was logged, and all weights in a row, after two steps with completions of the trainer's own."""
    rig = Rig(folder, chatty, replicas=0, grpo={**BASE, **grpo}, **spec)
    try:
        trainer = rig.assemble()
        trainer.train()
        weights = torch.cat([weight.detach().flatten().float() for weight in trainer.model.parameters()])
        return [row for row in trainer.state.log_history if "grad_norm" in row], weights
    finally:
        remove_spool(rig.work)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, chatty: Path) -> torch.Tensor:
    return train(tmp_path_factory.mktemp("plain"), chatty, {})[1]


@pytest.mark.parametrize("grpo", CHANGES, ids=" ".join)
def test_a_setting_changes_what_is_trained(
    grpo: dict[str, Any], plain: torch.Tensor, chatty: Path, tmp_path: Path
) -> None:
    rows, weights = train(tmp_path, chatty, grpo)
    assert len(rows) == 2
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in rows)
    assert bool(torch.isfinite(weights).all())
    assert (weights - plain).abs().max() > 1e-5


@pytest.mark.parametrize("grpo", LEAVES, ids=["computing", "loading and logging"])
def test_a_setting_leaves_the_weights_as_they_are(
    grpo: dict[str, Any], plain: torch.Tensor, chatty: Path, tmp_path: Path
) -> None:
    assert torch.equal(train(tmp_path, chatty, grpo)[1], plain)


def test_rewards_are_normalized_before_they_are_summed(chatty: Path, tmp_path: Path) -> None:
    weighted = {"reward_weights": [1.0, 100.0]}
    scaled = {**weighted, "multi_objective_aggregation": "normalize_then_sum"}
    _, first = train(tmp_path / "sums", chatty, weighted, witness="rig_rewards.digit_share")
    _, second = train(tmp_path / "scales", chatty, scaled, witness="rig_rewards.digit_share")
    assert (first - second).abs().max() > 1e-5


def test_a_template_is_told_what_the_run_says(chatty: Path, tmp_path: Path) -> None:
    chats = {"dataset": "chats.jsonl", "reward": "rig_tools.share_of_calls"}
    as_is = train(tmp_path / "as_is", chatty, {}, **chats)[0][0]
    asked = train(tmp_path / "asked", chatty, {"chat_template_kwargs": {"asked": True}}, **chats)[0][0]
    prompts = [row["num_tokens"] - COMPLETIONS * row["completions/mean_length"] for row in (as_is, asked)]
    assert prompts[1] - prompts[0] == pytest.approx(COMPLETIONS)  # a token each


def test_a_model_judges(chatty: Path, tmp_path: Path) -> None:
    config = LlamaConfig.from_pretrained(chatty / "model", num_labels=1)
    judge = write(tmp_path / "judge", chatty, LlamaForSequenceClassification(config))
    rows, _ = train(tmp_path / "run", chatty, {}, reward=str(judge), witness="rig_rewards.lower_share")
    assert math.isfinite(rows[0]["rewards/judge/mean"])
    assert rows[0]["rewards/judge/std"] > 0


def test_a_mixture_of_experts_is_published_as_it_is_loaded(chatty: Path, tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=LlamaConfig.from_pretrained(chatty / "model").vocab_size,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    experts = write(tmp_path / "experts", chatty, Qwen3MoeForCausalLM(config))
    with open_rig(tmp_path, chatty, model=str(experts), grpo={**BASE, "router_aux_loss_coef": 0.1}) as rig:
        trainer = rig.train()
        rows = [row for row in trainer.state.log_history if "reward" in row]
        assert rig.gateway.unproved == []
    assert all(row["aux_loss"] > 0 for row in rows)
    assert rows[0]["sampling/sampling_logp_difference/max"] < 1e-4


def write(folder: Path, chatty: Path, model: PreTrainedModel) -> Path:
    """A model's folder, with the tiny one's tokenizer."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(chatty / "model").save_pretrained(folder)
    return folder
