"""TRL's own training step, with its model, loss, optimizer and clipping, and what it holds at most."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import datasets
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.grpo_trainer import disable_gradient_checkpointing

from benchmarks.rig.sizing.as_on_gpu import as_on_gpu, without_content
from benchmarks.rig.sizing.live import LiveBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and how it is trained. `grpo` and `peft` are run.yaml's keys; lengths are in tokens."""

    name: str
    config: dict[str, Any]
    grpo: dict[str, Any] = field(default_factory=dict)
    peft: dict[str, Any] | None = None
    prompt_tokens: int = 256


def peaks_of(case: Case, *, real: bool = False, on_gpu: bool = True) -> dict[str, int]:
    """Return the most bytes that are alive in each phase of a step, of the second of two.

    Args:
        real: with tensors that have content, on this machine's CPU.
        on_gpu: by the way that TRL's head takes on a GPU; only without content.
    """
    batch = int(case.grpo["per_device_train_batch_size"])
    with ExitStack() as stack:
        if on_gpu:
            stack.enter_context(as_on_gpu())
        if not real:
            stack.enter_context(without_content(batch * int(case.grpo["max_completion_length"])))
        live = stack.enter_context(LiveBytes())
        _Stepper(case, live, batch).run()
    return {phase: most for phase, most in live.peaks.items() if phase}


class _Stepper:
    def __init__(self, case: Case, live: LiveBytes, batch: int) -> None:
        self._case, self._live, self._batch = case, live, batch
        config = AutoConfig.for_model(**case.config)
        settings = dict(case.grpo.get("model_init_kwargs") or {})
        dtype = getattr(torch, settings.pop("dtype", "float32"))
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **settings)
        given = {name: value for name, value in case.grpo.items() if name not in ("model_init_kwargs", "beta")}
        self._args = GRPOConfig(
            **{"use_cpu": True, "report_to": "none", "num_generations": batch, **given},
            output_dir=tempfile.gettempdir(),
        )
        self._trainer = GRPOTrainer(
            model=model,
            reward_funcs=_no_reward,
            args=self._args,
            train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * batch}),
            processing_class=_tokenizer(),
            peft_config=None if case.peft is None else LoraConfig(**case.peft, task_type="CAUSAL_LM"),
        )
        # What a beta brings, without a folder to load it from.
        self._trainer.beta = float(case.grpo.get("beta") or 0)
        if self._trainer.beta and case.peft is None:
            self._reference = AutoModelForCausalLM.from_config(config, dtype=dtype, **settings)

    def run(self) -> None:
        trainer, live = self._trainer, self._live
        trainer.create_optimizer()
        model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
        trainer.model_wrapped = model
        model.train()
        if self._args.gradient_checkpointing:
            trainer.model.gradient_checkpointing_enable(self._args.gradient_checkpointing_kwargs)
        trainer._prepare_inputs = lambda inputs: inputs
        batches = int(self._args.gradient_accumulation_steps)
        trainer.current_gradient_accumulation_steps = batches
        for step in range(2):
            live.phase = "score" if step else ""
            self._score(model)
            for _ in range(min(batches, 2)):
                live.phase = "forward" if step else ""
                with self._noting_the_backward_pass(step):
                    trainer.training_step(model, self._inputs(), torch.tensor(1.0))
            live.phase = "update" if step else ""
            trainer.accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            live.phase = ""
            model.zero_grad()

    @contextmanager
    def _noting_the_backward_pass(self, step: int) -> Iterator[None]:
        backward = self._trainer.accelerator.backward

        def noted(loss: torch.Tensor, **kwargs: Any) -> None:
            self._live.phase = "backward" if step else ""
            backward(loss, **kwargs)

        self._trainer.accelerator.backward = noted
        yield
        self._trainer.accelerator.backward = backward

    def _score(self, model: Any) -> None:
        found = self._inputs()
        ids = torch.cat([found["prompt_ids"], found["completion_ids"]], 1)
        mask = torch.cat([found["prompt_mask"], found["completion_mask"]], 1)
        length = found["completion_ids"].shape[1]
        with torch.no_grad(), disable_gradient_checkpointing(self._trainer.model, None):
            self._trainer._get_per_token_logps_and_entropies(model, ids, mask, length, batch_size=self._batch)

    def _inputs(self) -> dict[str, torch.Tensor]:
        """A batch as TRL hands it to its loss; the first sequence has one token less, and so there is a mask."""
        made = int(self._case.grpo["max_completion_length"])
        prompts = torch.ones((self._batch, self._case.prompt_tokens), dtype=torch.long)
        mask = prompts.clone()
        mask[0, 0] = 0
        found = {
            "prompt_ids": prompts,
            "prompt_mask": mask,
            "completion_ids": torch.ones((self._batch, made), dtype=torch.long),
            "completion_mask": torch.ones((self._batch, made), dtype=torch.long),
            "advantages": torch.zeros(self._batch),
            "num_items_in_batch": torch.tensor(float(self._batch * made)),
            "old_per_token_logps": torch.zeros(self._batch, made),
            "importance_sampling_ratio": torch.ones(self._batch, 1),
        }
        if self._trainer.beta:
            found["ref_per_token_logps"] = torch.zeros(self._batch, made)
        return found


def _no_reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def _tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
