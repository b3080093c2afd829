"""Saves checkpoints into the spool, and loads them so that a restart is exact.

A checkpoint also holds what TRL keeps in memory only: its place in the generation window, the rest of the window's
completions, and a synchronised reference model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from safetensors.torch import load_model, save_model
from transformers.trainer import TRAINING_ARGS_NAME

from grpo_orch.tasks.machine.leaving import Leaving
from grpo_orch.tasks.storing.saving import CheckpointSaver
from grpo_orch.tasks.storing.step_costs import StepCosts
from grpo_orch.tasks.trl import fast_save
from grpo_orch.tasks.trl.offloaded_adam import catch_up
from grpo_orch.tasks.trl.skipped_prompts import walk_of

WINDOW_FILE = "grpo_window_{rank}.pt"
REF_MODEL_FILE = "ref_model.safetensors"


class SavesIntoSpool:
    """Mixed in before TRL's trainer."""

    _checkpoints: CheckpointSaver | None = None  # in the first process only, like `_leaving`
    _leaving: Leaving | None = None
    save_is_due = False  # a save found no space; the same in every process
    _leaves = False  # the present save is the last
    _buffered_inputs: Any
    _costs: StepCosts
    _get_output_dir: Any
    _step: int
    _timeline: int
    accelerator: Any
    args: Any
    lr_scheduler: Any
    num_iterations: int
    optimizer: Any
    ref_model: Any
    state: Any
    train_dataset: Any

    def attach(self, checkpoints: CheckpointSaver, leaving: Leaving) -> None:
        """Set where checkpoints go and when to leave, in the first process, before training."""
        self._checkpoints, self._leaving = checkpoints, leaving

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save into the spool, or at a later step if the spool has no space."""
        began_s = time.monotonic()
        try:
            self._save_if_space(model, trial)
        finally:
            self._costs.store_s += time.monotonic() - began_s

    def _save_if_space(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        last = self._leaves or step >= self.state.max_steps
        while True:
            slot = self._checkpoints.open(step, last=last) if self._checkpoints is not None else None
            self.save_is_due = not broadcast_object_list([slot is not None])[0]
            began_s = time.monotonic()
            if self.save_is_due:
                return
            if self._save_into(slot, lambda: self._save_all(model, trial)):
                if self._leaving is not None:
                    self._leaving.saved(time.monotonic() - began_s)
                return

    def _save_into(self, slot: Path | None, save: Callable[[], None]) -> bool:
        """Save, and seal the slot once every process has saved. Return False if space ran out."""
        fits = all(gather_object([fast_save.fits(save)]))
        if self._checkpoints is not None and slot is not None:
            checkpoints, step = self._checkpoints, self.state.global_step
            fits = fits and fast_save.fits(lambda: checkpoints.seal(step, slot))
            if not fits:
                checkpoints.give_up(slot)
        return bool(broadcast_object_list([fits])[0])

    def _save_all(self, model: Any, trial: Any) -> None:
        with fast_save.overwriting():
            super()._save_checkpoint(model, trial)  # type: ignore[misc]  # the trainer's
            self._save_more(Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}")

    def _save_more(self, folder: Path) -> None:
        """Save what TRL keeps in memory only."""
        state = {
            "step": self._step,
            "buffered": self._rest_of_window(),
            "timeline": self._timeline,
            "learning_rate": self.args.learning_rate,
            "completions_per_step": completions_per_step(self.args),
        }
        torch.save(state, folder / WINDOW_FILE.format(rank=self.args.process_index))
        if self.accelerator.is_main_process:
            if self.args.sync_ref_model:
                save_model(self.accelerator.unwrap_model(self.ref_model), str(folder / REF_MODEL_FILE))
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)  # a pickle, which nothing reads

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]  # the trainer's
        if checkpoint is None:
            return
        catch_up(self.optimizer)
        state, same_processes = _window_state(Path(checkpoint), self.args, self.accelerator.device)
        self._step, self._buffered_inputs = state["step"], state["buffered"]
        if self.args.sync_ref_model:
            load_model(self.accelerator.unwrap_model(self.ref_model), str(Path(checkpoint) / REF_MODEL_FILE))
        if state["timeline"] != self._timeline or not same_processes:
            self._begin_timeline(state["learning_rate"])

    def _begin_timeline(self, learning_rate: float) -> None:
        """Begin from a checkpoint of an earlier timeline, or of another number of processes.

        The rest of the generation window is generated again: its completions belong to the abandoned steps, or are
        divided over other processes. Optimizer and scheduler have loaded `learning_rate`, which they would keep.
        """
        walk = walk_of(self.args, len(self.train_dataset))
        self._step, self._buffered_inputs = walk.batches_before(self.state.global_step), None
        if self.args.learning_rate != learning_rate:
            scale_learning_rate(self.optimizer, self.lr_scheduler, self.args.learning_rate / learning_rate)

    def _rest_of_window(self) -> Any:
        """Return the window's completions that are not trained on yet; None at the end of a window."""
        return self._buffered_inputs if self._step % self._window else None

    @property
    def _window(self) -> int:
        """Batches of a generation window."""
        return int(self.args.steps_per_generation * self.num_iterations)


def why_not_resumable(trainer: Any, checkpoint: Path) -> str:
    """Return why the trainer cannot resume from a checkpoint of another number of processes; empty if it can.

    With as many completions a step it sees the same prompts, draws the same seeds and sums the same gradients,
    rounded otherwise. Weights and optimizer must be whole in the checkpoint.
    """
    state, same_processes = _window_state(checkpoint, trainer.args, torch.device("cpu"))
    if same_processes:
        return ""
    now, before = completions_per_step(trainer.args), state["completions_per_step"]
    saved, processes = len(_window_files(checkpoint)), trainer.args.world_size
    message = f"the checkpoint is of {saved} processes, and {processes} would resume from it"
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return f"{message}: DeepSpeed and FSDP read shards only with the same number of processes; start {saved}"
    if now != before:
        product = "per_device_train_batch_size x gradient_accumulation_steps x processes"
        return f"{message}: expected {before} completions a step ({product}) as before, not {now}"
    return ""


def completions_per_step(args: Any) -> int:
    """Return the completions of one optimizer step, over all processes."""
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size)


def _window_state(checkpoint: Path, args: Any, device: torch.device) -> tuple[dict[str, Any], bool]:
    """Return this process's part, and whether the checkpoint is of as many processes as now; if not, the first
    process's part."""
    same_processes = len(_window_files(checkpoint)) == args.world_size
    path = checkpoint / WINDOW_FILE.format(rank=args.process_index if same_processes else 0)
    return torch.load(path, map_location=device, weights_only=True), same_processes


def _window_files(checkpoint: Path) -> list[Path]:
    return list(checkpoint.glob(WINDOW_FILE.format(rank="*")))


def scale_learning_rate(optimizer: Any, scheduler: Any, ratio: float) -> None:
    """Multiply the learning rate by `ratio`, now and in the rest of the schedule."""
    for group in optimizer.param_groups:
        for key in {"lr", "initial_lr"} & group.keys():
            group[key] *= ratio
    for name in ("base_lrs", "_last_lr"):  # the first only if the scheduler is a function of the step
        if hasattr(scheduler, name):
            setattr(scheduler, name, [value * ratio for value in getattr(scheduler, name)])
