"""The one module that knows TRL: its GRPOTrainer in server mode, with this project's fleet as the server.

TRL asks a `VLLMClient` for completions and hands it new weights. `tasks.trl.fleet_client` stands in that place, so
that TRL's own behaviour behind it stays, importance-sampling correction and its metrics included. The rest makes a
restart exact: what TRL keeps in memory only is saved with the checkpoint, or made a function of the epoch.

Every name of TRL that is not public is used here, in `tasks.trl.trl_leaving` and in `tasks.trl.trl_refused`;
`tests/node/test_trl_contract.py` says when a release has changed one.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import structlog
import torch
import trl.import_utils as trl_imports
from accelerate.utils import broadcast_object_list, gather_object
from safetensors.torch import load_model, save_model
from transformers.core_model_loading import revert_weight_conversion
from transformers.trainer import TRAINING_ARGS_NAME

from tasks.machine.leaving import LeaveNow, Leaving
from tasks.storing.saving import Checkpoints
from tasks.storing.step_costs import StepCosts
from tasks.trl import fast_save
from tasks.trl.canary import canary_of
from tasks.trl.fleet_client import LEFT, FleetClient
from tasks.trl.skipped_prompts import Replaced, Walk, draw_epochs_before, walk_of
from tasks.trl.trl_leaving import LeavesInTime
from tasks.trl.trl_refused import LeavesOutRefused

# The trainer generates nothing itself, and importing vLLM takes longer than all else that a restart does. TRL
# imports it wherever it is installed, unless it believes that it is not.
trl_imports.is_vllm_available = lambda **_: False

import trl.trainer.grpo_trainer as grpo_trainer_module  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.generation.vllm_generation import VLLMGeneration  # noqa: E402
from trl.trainer.utils import RepeatSampler  # noqa: E402

log = structlog.get_logger()

WINDOW_FILE = "grpo_window_{rank}.pt"
REF_MODEL_FILE = "ref_model.safetensors"

# Where run.yaml says nothing.
DEFAULTS: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 50,
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
}
EVALUATION_DEFAULTS: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 50}
# What makes it this project's trainer; run.yaml cannot change it.
# The spool's slots are the uploader's to free, so TRL must remove none.
OURS: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "server",
    "save_only_model": False,
    "save_total_limit": None,
}


def build_config(values: dict[str, Any], output_dir: Path, *, evaluates: bool) -> Any:
    """Return a GRPOConfig of run.yaml's `grpo`, word for word. Raises ValueError, TypeError as GRPOConfig does."""
    for name in OURS.keys() & values.keys():
        if values[name] != OURS[name]:
            raise ValueError(f"{name}: must be {OURS[name]!r} here, or left out")
    if "seed" in (values.get("generation_kwargs") or {}):
        raise ValueError(
            "generation_kwargs: `seed` must go, as each completion has a seed of its own (see `seed`)"
        )
    defaults = {**DEFAULTS, **(EVALUATION_DEFAULTS if evaluates else {})}
    return GRPOConfig(**{**defaults, **values, **OURS, "output_dir": str(output_dir)})


class FleetGeneration(VLLMGeneration):  # type: ignore[misc]  # TRL has no types
    """TRL's generation backend with a given client, and weights that a synchronization leaves untouched."""

    def __init__(self, client: FleetClient, *args: Any, **kwargs: Any) -> None:
        self._fleet_client = client
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        self.vllm_client = self._fleet_client
        self._weight_metadata: list[Any] = []  # what to announce to a collective: there is none
        self.accelerator.wait_for_everyone()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; raises LeaveNow in every process where the first one was told to leave."""
        found = super().generate(*args, **kwargs)
        if LEFT in found[1]:
            raise LeaveNow
        return found

    def sync_weights(self) -> None:
        """Publish the weights with what they compute, in every process at once: it may take all of them.

        Raises Diverged, in the first process, where that is nothing at all.
        """
        if not self._is_fsdp1:
            self._fleet_client.computed(canary_of(self.model, self.accelerator.mixed_precision))
        super().sync_weights()

    @property
    def _is_fsdp1(self) -> bool:
        """Under the first version of FSDP the model alone, outside its wrapper, computes nothing, and it takes all
        processes to list its state."""
        return bool(self._dist.is_fsdp and self._dist.fsdp_version == 1)

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """TRL's weights, adapters merged, under the names of the model's own checkpoint, and what else that holds.

        Merging adapters and taking them out again does not give back the same bits, and a restart has not done it
        as often: so the base weights are put back.
        """
        if self._dist.is_fsdp or self._dist.is_zero3:
            yield from self._iter_gathered_params()
            return
        base = [(weight, weight.detach().clone()) for weight in _adapted_weights(self.model)]
        # TRL takes the adapters out again when it has yielded its last weight: with adapters, copies are needed.
        named = {name: weight.detach().to("cpu", copy=bool(base)) for name, weight in super()._iter_named_params()}
        for weight, kept in base:
            weight.data.copy_(kept)
        model = plain_model(self.model)
        yield from revert_weight_conversion(model, named | _stored_buffers(model)).items()

    def _iter_gathered_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Of a model in shards: gathered by all processes, one weight at a time, and kept by the first alone."""
        gathered = super()._iter_named_params()
        if not self.accelerator.is_main_process:
            yield from gathered
            return
        named = {name: weight.detach().to("cpu", copy=True) for name, weight in gathered}
        model = plain_model(self.model)
        named |= {} if self._is_fsdp1 else _stored_buffers(model)
        yield from revert_weight_conversion(model, named).items()


class EpochSampler(RepeatSampler):  # type: ignore[misc]  # TRL has no types
    """TRL's sampler with its order a function of seed and epoch alone, the same order that TRL would draw.

    TRL draws each epoch's permutation from one generator whose state no checkpoint holds. `replaced` names prompts
    in the place of others, by the step of `walk` that takes a window of them first.
    """

    epoch = 0
    replaced = Replaced()
    walk: Walk  # needed where something is replaced

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            draw_epochs_before(self.epoch, self.num_samples, self.generator, self.seed)
        found: Iterator[int] = super().__iter__()
        return self._replaced(found) if self.replaced.others else found

    def _replaced(self, found: Iterator[int]) -> Iterator[int]:
        window_size = self.batch_size * self.mini_repeat_count * self.repeat_count
        for place, index in enumerate(found):
            step = self.walk.first_step_of(self.epoch, place // window_size)
            yield self.replaced.at(step).get(index, index)


class FleetGRPOTrainer(LeavesInTime, LeavesOutRefused, GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """GRPOTrainer whose completions come from the fleet and whose restarts are exact.

    Args:
        client: stands in the place of TRL's.
        costs: told what each completion earned.
        timeline: that this trainer trains; a checkpoint of an earlier one is where a fork begins.
        replaced: prompts in the place of others.
    """

    def __init__(
        self, client: FleetClient, costs: StepCosts, timeline: int, replaced: Replaced, **kwargs: Any
    ) -> None:
        self._costs = costs
        self._timeline = timeline
        self._replaced = replaced
        self._checkpoints: Checkpoints | None = None
        self.save_is_due = False  # a save found no room; the same in every process
        with _generation_through(client):
            super().__init__(**kwargs)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        theirs = super()._get_train_sampler(dataset)
        sampler = EpochSampler(
            data_source=theirs.data_source,
            mini_repeat_count=theirs.mini_repeat_count,
            batch_size=theirs.batch_size,
            repeat_count=theirs.repeat_count,
            shuffle=theirs.shuffle,
            seed=theirs.seed,
        )
        sampler.replaced, sampler.walk = self._replaced, walk_of(self.args, len(theirs.data_source))
        return sampler

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        per_function: torch.Tensor = self.without_refused(super()._calculate_rewards(*args, **kwargs))
        if self.model.training:
            rewards = (per_function * self.reward_weights.to(per_function.device)).nansum(dim=1)
            scored = ~torch.isnan(per_function).all(dim=1)
            self._costs.rewards.extend(rewards[scored].tolist())
        return per_function

    def attach(self, checkpoints: Checkpoints, leaving: Leaving) -> None:
        """Name where checkpoints go, and who knows when to leave. In the first process, before training."""
        self._checkpoints, self._leaving = checkpoints, leaving

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save into the spool; without room there, at a later step."""
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
        """Save, and hand the slot on once every process has; False if there was no room after all."""
        fits = all(gather_object([fast_save.fits(save)]))
        if self._checkpoints is not None and slot is not None:
            checkpoints, step = self._checkpoints, self.state.global_step
            fits = fits and fast_save.fits(lambda: checkpoints.seal(step, slot))
            if not fits:
                checkpoints.give_up(slot)
        return bool(broadcast_object_list([fits])[0])

    def _save_all(self, model: Any, trial: Any) -> None:
        with fast_save.overwriting():
            super()._save_checkpoint(model, trial)
            self._save_more(Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}")

    def _save_more(self, folder: Path) -> None:
        """What TRL keeps in memory only."""
        # Behind a whole window the next step generates anew and the buffer is spent.
        buffered = self._buffered_inputs if self._step % self._window else None
        state = {
            "step": self._step,
            "buffered": buffered,
            "timeline": self._timeline,
            "learning_rate": self.args.learning_rate,
        }
        torch.save(state, folder / self._window_file())
        if self.accelerator.is_main_process:
            if self.args.sync_ref_model:
                save_model(self.accelerator.unwrap_model(self.ref_model), str(folder / REF_MODEL_FILE))
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)  # a pickle, which nothing reads

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = Path(checkpoint) / self._window_file()
        state = torch.load(path, map_location=self.accelerator.device, weights_only=True)
        self._step, self._buffered_inputs = state["step"], state["buffered"]
        if self.args.sync_ref_model:
            load_model(self.accelerator.unwrap_model(self.ref_model), str(Path(checkpoint) / REF_MODEL_FILE))
        # A checkpoint from before there were forks names neither.
        if state.get("timeline", 0) != self._timeline:
            first_of_group = self.optimizer.param_groups[0].get("initial_lr", self.args.learning_rate)
            self._begin_timeline(state.get("learning_rate", first_of_group))

    def _begin_timeline(self, learning_rate: float) -> None:
        """Make of what an earlier timeline saved a beginning of this one, whose settings may be others.

        The rest of a generation window is made anew: its completions are of the abandoned stretch's kind, and may
        be of another number. Optimizer and scheduler have brought `learning_rate` along, which they would keep.
        """
        walk = walk_of(self.args, len(self.train_dataset))
        self._step, self._buffered_inputs = walk.batches_before(self.state.global_step), None
        if self.args.learning_rate != learning_rate:
            scale_learning_rate(self.optimizer, self.lr_scheduler, self.args.learning_rate / learning_rate)

    def _window_file(self) -> str:
        return WINDOW_FILE.format(rank=self.args.process_index)


@contextlib.contextmanager
def _generation_through(client: FleetClient) -> Iterator[None]:
    """While a trainer is made, the class that it takes for its generation backend is FleetGeneration."""
    theirs: Callable[..., Any] = grpo_trainer_module.VLLMGeneration
    grpo_trainer_module.VLLMGeneration = functools.partial(FleetGeneration, client)
    try:
        yield
    finally:
        grpo_trainer_module.VLLMGeneration = theirs


def scale_learning_rate(optimizer: Any, scheduler: Any, ratio: float) -> None:
    """Multiply the learning rate by `ratio`, now and all along the scheduler's way."""
    for group in optimizer.param_groups:
        for key in {"lr", "initial_lr"} & group.keys():
            group[key] *= ratio
    for name in ("base_lrs", "_last_lr"):  # the first only where the scheduler is a function of the step
        if hasattr(scheduler, name):
            setattr(scheduler, name, [value * ratio for value in getattr(scheduler, name)])


def shards_reference(trainer: Any) -> bool:
    """Whether a reference model that is synchronised lies in shards, of which a checkpoint would hold an empty
    shell: after a restart the reference would be the base model again."""
    plugin = trainer.accelerator.state.deepspeed_plugin
    in_shards = trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3)
    return bool(trainer.args.sync_ref_model and in_shards)


def checkpoint_bytes(trainer: Any) -> tuple[int, int]:
    """What the weights and the optimizer's state of a checkpoint will take, about: AdamW keeps two values for each
    weight that is trained."""
    trained = sum(weight.nbytes for weight in trainer.model.parameters() if weight.requires_grad)
    adapted = hasattr(trainer.model, "get_base_model")
    saved = trained if adapted else sum(weight.nbytes for weight in trainer.model.parameters())
    return saved, 2 * trained


def plain_model(model: Any) -> Any:
    """The model itself, without the adapters around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _stored_buffers(model: Any) -> dict[str, torch.Tensor]:
    """What a model's checkpoint holds besides its parameters, such as the biases of some routers: an engine that
    is given the one without the other does not keep the other."""
    stored = model.state_dict().keys()
    return {name: one.detach().to("cpu") for name, one in model.named_buffers() if name in stored}


def _adapted_weights(model: Any) -> list[torch.Tensor]:
    """The weights that merging adapters would change; none without PEFT."""
    if not hasattr(model, "merge_adapter"):
        return []
    layers = [
        module for module in model.modules() if hasattr(module, "get_base_layer") and hasattr(module, "merge")
    ]
    return [weight for layer in layers for weight in layer.get_base_layer().parameters(recurse=False)]
