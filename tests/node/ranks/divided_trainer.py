"""A trainer of transformers' that divides what it trains: `divided_trainer FOLDER ADAPTED CHECKPOINT`, launched.

It saves as ours does, goes on from CHECKPOINT unless that is empty, and takes part in what `cpu_for_gpu` pretends.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from accelerate.state import PartialState
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from grpo_orch.tasks.trl import fast_save
from grpo_orch.tasks.trl.parts.checkpointing import catch_up
from tests.node.ranks.cpu_for_gpu import prepare_backend

STEPS, SAVE_STEPS = 4, 2
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


class Divided(Trainer):
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with fast_save.overwriting():
            super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            catch_up(self.optimizer)


def main() -> None:
    folder, adapted, checkpoint = sys.argv[1:]
    PartialState._prepare_backend = prepare_backend
    config = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        save_steps=SAVE_STEPS,
        per_device_train_batch_size=2,
        learning_rate=3e-3,
        report_to="none",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2))
    if adapted == "True":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    rows = torch.randint(0, 32, (64, 8), generator=torch.Generator().manual_seed(3))
    trainer = Divided(model=model, args=config, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train(resume_from_checkpoint=checkpoint or None)
    sys.stdout.flush()
    os._exit(0)  # as the product's trainer ends: torch's threads may abort what ends otherwise


if __name__ == "__main__":
    main()
