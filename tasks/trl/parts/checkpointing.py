"""Save checkpoints into the spool, and load them so that a restart is exact.

A checkpoint also holds what TRL keeps in memory only: its place in the generation window, the rest of the window's
completions, and a synchronised reference model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
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
from grpo_orch.tasks.trl.skipped_prompts import Walk

WINDOW_FILE = "grpo_window_{rank}.pt"
REF_MODEL_FILE = "ref_model.safetensors"


@dataclass(frozen=True, slots=True)
class Place:
    """TRL's place in the run.

    Attributes:
        batches: how many it has trained on.
        buffered: the generation window's completions; None at the end of a window.
    """

    batches: int
    buffered: list[dict[str, Any]] | None


class Saving:
    """Saves into the spool, or at a later step if the spool has no space.

    Attributes:
        checkpoints: the spool's slots; in the first process only.
        leaving: when to leave; in the first process only.
        is_due: whether the last save found no space; the same in every process.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self.checkpoints: CheckpointSaver | None = None
        self.leaving: Leaving | None = None
        self.is_due = False

    def attach(self, checkpoints: CheckpointSaver, leaving: Leaving) -> None:
        """Set where checkpoints go and when to leave, in the first process, before training."""
        self.checkpoints, self.leaving = checkpoints, leaving

    def save(self, step: int, write: Callable[[], None], *, is_last: bool) -> None:
        """Save a step by `write`, which all processes call at the same time. It may be called again."""
        began_s = time.monotonic()
        try:
            self._save_if_space(step, write, is_last)
        finally:
            self._costs.store_s += time.monotonic() - began_s

    def _save_if_space(self, step: int, write: Callable[[], None], is_last: bool) -> None:
        while True:
            slot = self.checkpoints.claim_slot(step, last=is_last) if self.checkpoints is not None else None
            self.is_due = not broadcast_object_list([slot is not None])[0]
            began_s = time.monotonic()
            if self.is_due:
                return
            if self._save_into(step, slot, write):
                if self.leaving is not None:
                    self.leaving.saved(time.monotonic() - began_s)
                return

    def _save_into(self, step: int, slot: Path | None, write: Callable[[], None]) -> bool:
        """Save, and seal the slot once every process has saved. Return False if space ran out."""
        fits = all(gather_object([fast_save.fits(write)]))
        if self.checkpoints is not None and slot is not None:
            checkpoints = self.checkpoints
            fits = fits and fast_save.fits(lambda: checkpoints.seal(step, slot))
            if not fits:
                checkpoints.discard(slot)
        return bool(broadcast_object_list([fits])[0])


class MemoryState:
    """The part of a checkpoint that TRL keeps in memory only.

    Args:
        args: the trainer's GRPOConfig.
        walk: the trainer's way through its dataset.
        timeline: the trained timeline. It may begin from a checkpoint of an earlier one.
    """

    def __init__(self, accelerator: Any, args: Any, walk: Walk, timeline: int) -> None:
        self._accelerator, self._args = accelerator, args
        self._walk, self._timeline = walk, timeline

    def save(self, folder: Path, place: Place, reference: Any) -> None:
        """Add this process's part to a checkpoint's folder.

        Args:
            reference: the reference model, if it is synchronised as it goes; otherwise None.
        """
        state = {
            "step": place.batches,
            "buffered": place.buffered,
            "timeline": self._timeline,
            "learning_rate": self._args.learning_rate,
            "completions_per_step": completions_per_step(self._args),
        }
        torch.save(state, folder / WINDOW_FILE.format(rank=self._args.process_index))
        if self._accelerator.is_main_process:
            if reference is not None:
                save_model(reference, str(folder / REF_MODEL_FILE))
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)  # a pickle, which nothing reads

    def load(self, folder: Path, step: int, optimizer: Any, scheduler: Any, reference: Any) -> Place:
        """Return the place in a checkpoint of `step`, once TRL has loaded optimizer and scheduler.

        A checkpoint of an earlier timeline, or of another number of processes, begins a timeline. Then the rest of
        the generation window is generated again: its completions belong to the abandoned steps, or are divided
        over other processes.
        """
        catch_up(optimizer)
        state, same_processes = _window_state(folder, self._args, self._accelerator.device)
        if reference is not None:
            load_model(reference, str(folder / REF_MODEL_FILE))
        if state["timeline"] == self._timeline and same_processes:
            return Place(state["step"], state["buffered"])
        # Optimizer and scheduler have loaded the checkpoint's learning rate, which they would keep.
        if self._args.learning_rate != state["learning_rate"]:
            scale_learning_rate(optimizer, scheduler, self._args.learning_rate / state["learning_rate"])
        return Place(self._walk.batches_before(step), None)


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


def catch_up(optimizer: Any) -> None:
    """Have DeepSpeed's CPU Adam continue bit for bit after a restart. Other optimizers are left alone.

    Its module keeps the powers of both betas outside of any checkpoint. It multiplies them at each step, but
    computes them again if steps do not follow each other, which rounds differently (DeepSpeed 0.19,
    `csrc/includes/cpu_adam.h`). So the steps of the loaded state are repeated over no weights, a microsecond each.

    Args:
        optimizer: the trainer's, wrapped by accelerate and DeepSpeed.
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not hasattr(optimizer, "ds_opt_adam"):
        return
    group, none = optimizer.param_groups[0], torch.empty(0)
    taken = max((int(state["step"]) for state in optimizer.state.values() if state), default=0)
    for step in range(1, taken + 1):
        settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, *settings, none, none, none, none)
