"""The one module that knows TRL: its GRPOTrainer in server mode, with this project's fleet as the server.

TRL asks a `VLLMClient` for completions and hands it new weights. `tasks.trl.fleet_client` stands in that place, so
TRL's own behaviour stays, importance-sampling correction and its metrics included. An epoch's order becomes a
function of the epoch, so that a restart is exact.

Names of TRL that are not public are used in this module, its `parts` and `trl_evaluating` alone;
`tests/node/test_trl_contract.py` says when a release has changed one.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
import torch
import trl.import_utils as trl_imports
from accelerate.utils import broadcast_object_list, gather_object

from checkpoint.records.rollouts import Session
from policies.detect.symptoms import WITNESS
from policies.model.spec import STALE_DEFAULTS
from tasks.machine.leaving import LeaveNow
from tasks.storing.step_costs import StepCosts
from tasks.storing.tensors import Unread, at_hand
from tasks.trl.canary import canary_of, forget_order
from tasks.trl.checkpoint_names import as_in_checkpoint
from tasks.trl.fleet_client import FleetClient, Instead
from tasks.trl.parts.agents import RunsAgents
from tasks.trl.parts.branches import TrainsBranches
from tasks.trl.parts.foreseen import ForeseesEvaluation
from tasks.trl.parts.leaving import LeavesInTime
from tasks.trl.parts.refused import LeavesOutRefused
from tasks.trl.parts.samples import KeepsSamples
from tasks.trl.parts.saving import SavesIntoSpool
from tasks.trl.parts.turns import TakesTurnsTogether
from tasks.trl.skipped_prompts import ReplacedPrompts, Walk, draw_epochs_before, walk_of
from tasks.trl.unrewarded import Unrewarded
from tasks.trl.weights import adapter_tensors, plain_model, stored_buffers, whole_weights

# The trainer generates nothing itself, and importing vLLM takes longer than all else that a restart does. TRL
# imports it wherever it is installed, unless it believes that it is not.
trl_imports.is_vllm_available = lambda **_: False

import trl.trainer.grpo_trainer as grpo_trainer_module  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.generation.vllm_generation import VLLMGeneration  # noqa: E402
from trl.trainer.utils import RepeatSampler  # noqa: E402

log = structlog.get_logger()

# Where run.yaml says nothing.
DEFAULTS: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 50,
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
    # The others wait in a collective while the first has no node to ask, which is nobody's failure, or no room for
    # a checkpoint. A process that dies is noticed by the launcher.
    "ddp_timeout": 86_400,
}
EVALUATION_DEFAULTS: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 50}
# What makes it this project's trainer, and run.yaml cannot change. The uploader frees the spool's slots, so TRL
# must remove none.
FIXED: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "server",
    "save_only_model": False,
    "save_total_limit": None,
}


def build_config(values: dict[str, Any], output_dir: Path, *, evaluates: bool, max_staleness: int = 0) -> Any:
    """Return a GRPOConfig of run.yaml's `grpo`, word for word. Raises ValueError, TypeError as GRPOConfig does."""
    for name in FIXED.keys() & values.keys():
        if values[name] != FIXED[name]:
            raise ValueError(f"{name}: must be {FIXED[name]!r} here, or left out")
    if "seed" in (values.get("generation_kwargs") or {}):
        raise ValueError(
            "generation_kwargs: `seed` must go, as each completion has a seed of its own (see `seed`)"
        )
    defaults = {
        **DEFAULTS,
        **(EVALUATION_DEFAULTS if evaluates else {}),
        **(STALE_DEFAULTS if max_staleness else {}),
    }
    return GRPOConfig(**{**defaults, **values, **FIXED, "output_dir": str(output_dir)})


class FleetGeneration(VLLMGeneration):  # type: ignore[misc]  # TRL has no types
    """TRL's generation backend over the fleet, with weights that a synchronization leaves untouched."""

    def __init__(self, client: FleetClient, *args: Any, **kwargs: Any) -> None:
        self._fleet_client = client
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        self.vllm_client = self._fleet_client
        self._weight_metadata: list[Any] = []  # what to announce to a collective: there is none
        self.accelerator.wait_for_everyone()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; raises LeaveNow in every process where the first one was told to leave."""
        while True:
            found = super().generate(*args, **kwargs)
            instead = [one for one in found[1] if isinstance(one, Instead)]
            if not instead:
                return found
            self._do_instead(instead[0])

    def run_agents(self, rows: list[dict[str, Any]], samples: int) -> list[Session]:
        """Return the sessions of this process's rows, of which each stands `samples` times in a row; the first
        process has them made for all. Raises LeaveNow in every process."""
        sampling: dict[str, Any] = {
            "repetition_penalty": self.repetition_penalty,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or 0.0,
        }
        if self.structured_outputs_regex is not None:
            sampling["structured_outputs"] = {"regex": self.structured_outputs_regex}
        sampling.update(self.generation_kwargs)
        every = gather_object(rows)
        while True:
            made: list[Any] = [None]
            if self.accelerator.is_main_process:
                made = [self._fleet_client.run_agents(every[::samples], samples, sampling)]
            [found] = broadcast_object_list(made)
            if not isinstance(found, Instead):
                first = self.accelerator.process_index * len(rows)
                sessions: list[Session] = found[first : first + len(rows)]
                return sessions
            self._do_instead(found)

    def _do_instead(self, instead: Instead) -> None:
        """Do together what there has to be before any completions."""
        match instead:
            case Instead.WEIGHTS_FIRST:
                self._publish_together()
            case Instead.OWN_TURN:
                self._fleet_client.take_own_turn(self.accelerator)
            case Instead.LEAVING:
                raise LeaveNow

    def sync_weights(self) -> None:
        """Name the weights of the present step and what they compute. They are read once they are needed.

        Where each process has all of them, the first one's are enough; else reading them takes all processes, and
        `generate` does it. An adapter that travels alone is read as it is: nothing is merged into any weights.

        Raises Diverged, in the first process, where the weights compute no number.
        """
        if not (self._is_divided or self.accelerator.is_main_process):
            return
        if not self._is_fsdp1:
            self._fleet_client.take_canary(canary_of(self.model, self.accelerator.mixed_precision))
            if self._dist.is_zero3:
                forget_order(self.accelerator)
        self._fleet_client.update_named_params(None, None if self._is_divided else self._weights())

    def _publish_together(self) -> None:
        """Publish weights that are divided over processes: all take part in reading what the first one names."""
        if self._is_fsdp1:
            self._publish_at_once()
            return
        # In every process: listing the state has FSDP2 divide again what a forward pass has left whole.
        stored_buffers(plain_model(self.model))
        weights = whole_weights(self.model, self._dist.gather_params)
        if not self.accelerator.is_main_process:
            while (name := broadcast_object_list([None])[0]) is not None:
                weights[name].read()
            return

        def read(name: str) -> torch.Tensor:
            broadcast_object_list([name])
            return weights[name].read()

        named = {name: replace(one, read=functools.partial(read, name)) for name, one in weights.items()}
        self._fleet_client.update_named_params(None, self._as_in_checkpoint(named))
        self._fleet_client.publish()
        broadcast_object_list([None])

    def _publish_at_once(self) -> None:
        """The same where all take part in reading all: the first process holds a copy of them."""
        whole = super()._iter_named_params()
        if self.accelerator.is_main_process:
            named = {name: at_hand(one.detach().to("cpu", copy=True)) for name, one in whole}
            tensors = as_in_checkpoint(plain_model(self.model), named).items()
            self._fleet_client.update_named_params(None, iter(tensors))
            self._fleet_client.publish()
        else:
            for _ in whole:
                pass

    def _weights(self) -> Iterator[tuple[str, torch.Tensor | Unread]]:
        """What is published where each process has all weights."""
        if self._fleet_client.publishes_adapters:
            return adapter_tensors(self.model)
        return self._as_in_checkpoint(whole_weights(self.model, self._dist.gather_params))

    def _as_in_checkpoint(self, named: dict[str, Unread]) -> Iterator[tuple[str, torch.Tensor | Unread]]:
        """The weights, and the buffers that are stored with them, as the model's own checkpoint names them."""
        model = plain_model(self.model)
        buffers = {name: at_hand(one) for name, one in stored_buffers(model).items()}
        yield from as_in_checkpoint(model, {**named, **buffers}).items()

    @property
    def _is_divided(self) -> bool:
        """Whether no process has all weights."""
        return bool(self._dist.is_fsdp or self._dist.is_zero3)

    @property
    def _is_fsdp1(self) -> bool:
        """Under the first version of FSDP the model alone, outside its wrapper, computes nothing, and it takes all
        processes to list its state."""
        return bool(self._dist.is_fsdp and self._dist.fsdp_version == 1)


class EpochSampler(RepeatSampler):  # type: ignore[misc]  # TRL has no types
    """TRL's sampler with its order a function of seed and epoch alone, the same order that TRL would draw.

    TRL draws each epoch's permutation from one generator whose state no checkpoint holds. `replaced` names prompts
    in the place of others, by the step of `walk` that takes a window of them first.
    """

    epoch = 0
    replaced = ReplacedPrompts()
    walk: Walk  # needed where something is replaced

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


class FleetGRPOTrainer(
    TrainsBranches,
    ForeseesEvaluation,
    LeavesInTime,
    KeepsSamples,
    LeavesOutRefused,
    RunsAgents,
    SavesIntoSpool,
    TakesTurnsTogether,
    GRPOTrainer,  # type: ignore[misc]  # it has no types
):
    """GRPOTrainer whose completions come from the fleet and whose restarts are exact.

    Args:
        client: stands in the place of TRL's.
        costs: told what each completion earned.
        timeline: that this trainer trains; a checkpoint of an earlier one is where a fork begins.
        replaced: prompts in the place of others.
    """

    def __init__(
        self, client: FleetClient, costs: StepCosts, timeline: int, replaced: ReplacedPrompts, **kwargs: Any
    ) -> None:
        self._fleet = client
        self._costs = costs
        self._timeline = timeline
        self._replaced = replaced
        self._unrewarded = Unrewarded()
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
        self._sampler = sampler
        return sampler

    def _run_epoch(self, *, epoch: int, **rest: Any) -> None:
        # Not left to accelerate: where several processes go on from a checkpoint within an epoch, one wrapper more
        # is around the sampler than accelerate looks into.
        self._sampler.epoch = epoch
        super()._run_epoch(epoch=epoch, **rest)

    def _calculate_rewards(self, inputs: list[Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        if (no_rewards := self.no_rewards(len(inputs))) is not None:
            return no_rewards
        began_s = time.monotonic()
        found: torch.Tensor = super()._calculate_rewards(inputs, *args, **kwargs)
        per_function = self.without_failed(self.without_refused(found))
        if self.model.training:
            self._costs.rewards_s += time.monotonic() - began_s
            rewards = (per_function * self.reward_weights.to(per_function.device)).nansum(dim=1)
            scored = ~torch.isnan(per_function).all(dim=1)
            self._costs.rewards.extend(rewards[scored].tolist())
            self._unrewarded.note(*self._counts(per_function), self.reward_func_names)
        self._log_witnesses(per_function)
        self._rewarded = per_function
        return per_function

    def _counts(self, per_function: torch.Tensor) -> tuple[int, int]:
        """Completions of all processes that a node made, or sessions, and those of them that have a reward."""
        # A session without a turn is left out as a refused prompt is. Where all are, the agent is broken.
        refused = 0 if self._refused is None or self._sessions is not None else int(self._refused.sum())
        return len(per_function) - refused, int((~torch.isnan(per_function).all(dim=1)).sum())

    def try_prompt(self, prompt: Any) -> None:
        """Make tokens of a prompt as a step does. A token that was added to the tokenizer alone has no embedding.

        Raises ValueError for such a token, and what TRL, transformers and the chat template raise.
        """
        if self.environment_factories is not None:
            return
        largest = max(self._tokenize_prompts([prompt])[0][0], default=0)
        known = self.model.config.get_text_config().vocab_size
        if largest >= known:
            token = self._tokenizer.convert_ids_to_tokens(largest)
            told = f"{token} is token {largest}, and the model has {known}"
            raise ValueError(f"{told}; call `resize_token_embeddings` on the model, or take it from the tokenizer")

    def _log_witnesses(self, per_function: torch.Tensor) -> None:
        """Say which scores are not trained on: nothing that is logged tells the weights of reward functions."""
        for at in (self.reward_weights == 0).nonzero().flatten().tolist():
            self._log_metric(WITNESS + self.reward_func_names[at], torch.nanmean(per_function[:, at]).item())


@contextlib.contextmanager
def _generation_through(client: FleetClient) -> Iterator[None]:
    """While a trainer is made, the class that it takes for its generation backend is FleetGeneration."""
    theirs: Callable[..., Any] = grpo_trainer_module.VLLMGeneration
    grpo_trainer_module.VLLMGeneration = functools.partial(FleetGeneration, client)
    try:
        yield
    finally:
        grpo_trainer_module.VLLMGeneration = theirs


def shards_reference(trainer: Any) -> bool:
    """Whether a reference model that is synchronised lies in shards, of which a checkpoint would hold an empty
    shell: after a restart the reference would be the base model again."""
    plugin = trainer.accelerator.state.deepspeed_plugin
    in_shards = trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3)
    return bool(trainer.args.sync_ref_model and in_shards)
