"""One run of TRL's GRPOTrainer as a regime has it, and the rows that TRL logs of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.recordings.regime import Lesson, Regime
from benchmarks.recordings.rewards import make_reward, true_score
from benchmarks.recordings.tasks import USUAL, examples

# What says nothing that other columns do not: the files would be twice as large.
LEFT_OUT = (
    "epoch",
    "num_tokens",
    "step_time",
    "rewards/",
    "completions/min_",
    "completions/max_",
    "completions/mean_terminated",
    "clip_ratio/low",
    "clip_ratio/high",
)
OF_THE_END = "train_runtime"


def common(regime: Regime, folder: Path) -> GRPOConfig:
    """The settings of a run: those that all have in common, and the regime's own."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": regime.steps,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "beta": 0.04,
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "max_completion_length": 32,
        "logging_steps": 1,
        "shuffle_dataset": not regime.lessons,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": regime.seed,
        # Sampling from what is not a number raises in transformers; engines that serve go on with some token.
        "generation_kwargs": {"remove_invalid_values": True},
    }
    if regime.witness:
        settings["reward_weights"] = [1.0, 0.0]
    return GRPOConfig(**(settings | dict(regime.grpo)))


def prompts(regime: Regime, config: GRPOConfig) -> Dataset:
    """As many rows as the run takes, lesson by lesson."""
    per_step = config.generation_batch_size // config.num_generations / config.num_iterations
    lessons = regime.lessons or (Lesson(1.0, regime.task, USUAL),)
    rows = []
    for number, lesson in enumerate(lessons):
        rows += examples(
            lesson.task, regime.seed + number, math.ceil(lesson.share * regime.steps * per_step), lesson.sizes
        )
    return Dataset.from_list(rows)


class Rows(TrainerCallback):
    """Keeps what is logged of training."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        if OF_THE_END in logs:
            return
        row: dict[str, Any] = {"step": state.global_step}
        row |= {name: rounded(value) for name, value in logs.items() if not name.startswith(LEFT_OUT)}
        self.rows.append(row)


def rounded(value: Any) -> float | None:
    """Six significant digits; None for what is not finite."""
    return float(f"{float(value):.6g}") if value is not None and math.isfinite(float(value)) else None


class RegimeTrainer(GRPOTrainer):
    """TRL's trainer with what a regime does to it."""

    def __init__(self, regime: Regime, **settings: Any) -> None:
        self._regime = regime
        self._stale: Any = None
        self._logps: Any = None
        super().__init__(**settings)
        if regime.sampler.temperature is not None:
            self.generation_config.temperature = regime.sampler.temperature

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self._regime.rate_doubles is None:
            return super().create_scheduler(num_training_steps, optimizer)
        start, steps = self._regime.rate_doubles
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: 2 ** (max(0, step - start) / steps))
        return self.lr_scheduler

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Sample from weights that are refreshed every `stale_steps` only."""
        steps = self._regime.sampler.stale_steps
        if not steps:
            return super()._generate_single_turn(*args, **kwargs)
        if self.state.global_step % steps == 0:
            self._stale = copy.deepcopy(self.model.state_dict())
        now = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(self._stale)
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            self.model.load_state_dict(now)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        self._logps, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self._logps, *others

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        if self._regime.signed_kl:
            mask = inputs["completion_mask"]
            difference = (self._logps.detach() - inputs["ref_per_token_logps"]) * mask
            self._metrics["train"]["kl"][-1] = (difference.sum() / mask.sum()).item()
        return loss


def run(
    regime: Regime, models: Path, folder: Path, make: Callable[..., RegimeTrainer] = RegimeTrainer
) -> list[dict[str, Any]]:
    """The rows of a run, to its end, by the trainer that `make` returns."""
    torch.manual_seed(regime.seed)
    config = common(regime, folder)
    rows = Rows()
    model = AutoModelForCausalLM.from_pretrained(models / regime.model, dtype=getattr(torch, regime.dtype))
    adapter = LoraConfig(r=regime.lora_rank, lora_alpha=2 * regime.lora_rank, target_modules="all-linear")
    reward = make_reward(regime.reward, config.max_completion_length, regime.seed)
    trainer = make(
        regime,
        model=model,
        args=config,
        processing_class=AutoTokenizer.from_pretrained(models / regime.model),
        train_dataset=prompts(regime, config),
        reward_funcs=[reward, true_score] if regime.witness else reward,
        peft_config=adapter if regime.lora_rank else None,
        callbacks=[rows],
    )
    trainer.train()
    return rows.rows
