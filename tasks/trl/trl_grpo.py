"""The one module that knows TRL: its GRPOTrainer in server mode, with this project's fleet as the server.

TRL asks a `VLLMClient` for completions and hands it new weights. `tasks.trl.fleet_client` replaces that client, so
TRL's own behaviour stays, including its importance-sampling correction and metrics. An epoch's order becomes a
function of the epoch, so that a restart is exact.

Only this module, its `parts` and `trl_evaluating` use private names of TRL; `tests/node/test_trl_contract.py`
fails if a release changes one.
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

from grpo_orch.checkpoint.records.rollouts import Session
from grpo_orch.policies.detect.symptoms import WITNESS
from grpo_orch.policies.model.spec import STALE_DEFAULTS
from grpo_orch.tasks.machine.leaving import LeaveNow
from grpo_orch.tasks.storing.step_costs import StepCosts
from grpo_orch.tasks.storing.tensors import LazyTensor
from grpo_orch.tasks.trl.canary import canary_of, forget_order
from grpo_orch.tasks.trl.checkpoint_names import as_in_checkpoint
from grpo_orch.tasks.trl.fleet_client import FleetClient, Instead
from grpo_orch.tasks.trl.parts.agents import RunsAgents
from grpo_orch.tasks.trl.parts.branches import TrainsBranches
from grpo_orch.tasks.trl.parts.foreseen import ForeseesEvaluation
from grpo_orch.tasks.trl.parts.leaving import LeavesInTime
from grpo_orch.tasks.trl.parts.refused import LeavesOutRefused
from grpo_orch.tasks.trl.parts.samples import KeepsSamples
from grpo_orch.tasks.trl.parts.saving import SavesIntoSpool
from grpo_orch.tasks.trl.parts.turns import TakesTurnsTogether
from grpo_orch.tasks.trl.skipped_prompts import ReplacedPrompts, Walk, draw_epochs_before, walk_of
from grpo_orch.tasks.trl.unrewarded import Unrewarded
from grpo_orch.tasks.trl.weights import adapter_tensors, plain_model, stored_buffers, whole_weights

# TRL imports vLLM wherever it is installed. The trainer does not use it, and the import would take longer than the
# rest of a restart.
trl_imports.is_vllm_available = lambda **_: False

import trl.trainer.grpo_trainer as grpo_trainer_module  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.generation.vllm_generation import VLLMGeneration  # noqa: E402
from trl.trainer.utils import RepeatSampler  # noqa: E402

log = structlog.get_logger()

# Where run.yaml sets nothing.
DEFAULTS: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 50,
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
    # The other processes wait in a collective while the first waits for a node or for space for a checkpoint. A
    # dead process is noticed by the launcher.
    "ddp_timeout": 86_400,
}
EVALUATION_DEFAULTS: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 50}
# run.yaml cannot change these. The uploader frees the spool's slots, so TRL must remove none.
FIXED: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "server",
    "save_only_model": False,
    "save_total_limit": None,
}


def build_config(values: dict[str, Any], output_dir: Path, *, evaluates: bool, max_staleness: int = 0) -> Any:
    """Return a GRPOConfig of run.yaml's `grpo` section. Raises ValueError, TypeError as GRPOConfig does."""
    for name in FIXED.keys() & values.keys():
        if values[name] != FIXED[name]:
            raise ValueError(f"{name}: expected {FIXED[name]!r}, or no such key")
    if "seed" in (values.get("generation_kwargs") or {}):
        raise ValueError(
            "generation_kwargs: remove `seed`; each completion has a seed of its own, from `grpo.seed`"
        )
    defaults = {
        **DEFAULTS,
        **(EVALUATION_DEFAULTS if evaluates else {}),
        **(STALE_DEFAULTS if max_staleness else {}),
    }
    return GRPOConfig(**{**defaults, **values, **FIXED, "output_dir": str(output_dir)})


class FleetGeneration(VLLMGeneration):  # type: ignore[misc]  # TRL has no types
    """TRL's generation backend over the fleet. Synchronizing leaves the weights untouched."""

    def __init__(self, client: FleetClient, *args: Any, **kwargs: Any) -> None:
        self._fleet_client = client
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        self.vllm_client = self._fleet_client
        self._weight_metadata: list[Any] = []  # no collective, so nothing to announce
        self.accelerator.wait_for_everyone()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as TRL does. Raises LeaveNow in every process if the first one has to leave."""
        while True:
            answer = super().generate(*args, **kwargs)
            instead = next((marker for marker in answer[1] if isinstance(marker, Instead)), None)
            if instead is None:
                return answer
            self._do_instead(instead)

    def run_agents(self, rows: list[dict[str, Any]], samples: int) -> list[Session]:
        """Return the sessions of this process's rows, in which each row occurs `samples` times in succession.

        The first process runs the agents of all processes. Raises LeaveNow in every process.
        """
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
            answer: list[Any] = [None]
            if self.accelerator.is_main_process:
                answer = [self._fleet_client.run_agents(every[::samples], samples, sampling)]
            [all_sessions] = broadcast_object_list(answer)
            if not isinstance(all_sessions, Instead):
                first = self.accelerator.process_index * len(rows)
                sessions: list[Session] = all_sessions[first : first + len(rows)]
                return sessions
            self._do_instead(all_sessions)

    def _do_instead(self, instead: Instead) -> None:
        """Do what all processes must do together before there are completions."""
        match instead:
            case Instead.WEIGHTS_FIRST:
                self._publish_together()
            case Instead.OWN_TURN:
                self._fleet_client.take_own_turn(self.accelerator)
            case Instead.LEAVING:
                raise LeaveNow

    def sync_weights(self) -> None:
        """Give the client the present step's weights, which it reads when needed, and their canary.

        If each process has all weights, the first one reads its own. Otherwise reading takes all processes, and
        `generate` does it. An adapter that is published alone is read without merging.

        Raises Diverged, in the first process, if the weights compute no finite number.
        """
        if not (self._is_divided or self.accelerator.is_main_process):
            return
        if not self._is_fsdp1:
            self._fleet_client.take_canary(canary_of(self.model, self.accelerator.mixed_precision))
            if self._dist.is_zero3:
                forget_order(self.accelerator)
        self._fleet_client.update_named_params(None, None if self._is_divided else self._weights())

    def _publish_together(self) -> None:
        """Publish weights that are divided over processes: all take part in each read."""
        if self._is_fsdp1:
            self._publish_at_once()
            return
        # In every process: listing the state makes FSDP2 divide again what a forward pass has gathered.
        stored_buffers(plain_model(self.model))
        weights = whole_weights(self.model, self._dist.gather_params)
        if not self.accelerator.is_main_process:
            while (name := broadcast_object_list([None])[0]) is not None:
                weights[name].read()
            return

        def read(name: str) -> torch.Tensor:
            broadcast_object_list([name])
            return weights[name].read()

        named = {name: replace(weight, read=functools.partial(read, name)) for name, weight in weights.items()}
        self._fleet_client.update_named_params(None, self._as_in_checkpoint(named))
        self._fleet_client.publish()
        broadcast_object_list([None])

    def _publish_at_once(self) -> None:
        """Publish under FSDP1, where all processes read all weights: the first process copies them."""
        whole = super()._iter_named_params()
        if self.accelerator.is_main_process:
            named = {name: LazyTensor.of(weight.detach().to("cpu", copy=True)) for name, weight in whole}
            tensors = as_in_checkpoint(plain_model(self.model), named).items()
            self._fleet_client.update_named_params(None, iter(tensors))
            self._fleet_client.publish()
        else:
            for _ in whole:
                pass

    def _weights(self) -> Iterator[tuple[str, torch.Tensor | LazyTensor]]:
        """Return the tensors to publish, if each process has all weights."""
        if self._fleet_client.publishes_adapters:
            return adapter_tensors(self.model)
        return self._as_in_checkpoint(whole_weights(self.model, self._dist.gather_params))

    def _as_in_checkpoint(self, named: dict[str, LazyTensor]) -> Iterator[tuple[str, torch.Tensor | LazyTensor]]:
        """Yield weights and stored buffers under the names in the model's own checkpoint."""
        model = plain_model(self.model)
        buffers = {name: LazyTensor.of(buffer) for name, buffer in stored_buffers(model).items()}
        yield from as_in_checkpoint(model, {**named, **buffers}).items()

    @property
    def _is_divided(self) -> bool:
        """Whether no process has all weights."""
        return bool(self._dist.is_fsdp or self._dist.is_zero3)

    @property
    def _is_fsdp1(self) -> bool:
        """Whether FSDP 1 is in use: the model cannot compute outside its wrapper, and listing its state takes all
        processes."""
        return bool(self._dist.is_fsdp and self._dist.fsdp_version == 1)


class EpochSampler(RepeatSampler):  # type: ignore[misc]  # TRL has no types
    """TRL's sampler, whose order depends only on seed and epoch. It is the order that TRL would draw.

    TRL draws each epoch's permutation from one generator whose state no checkpoint holds. `replaced` maps prompts
    to their replacements, from the step of `walk` that first uses their window.
    """

    epoch = 0
    replaced = ReplacedPrompts()
    walk: Walk  # used only if prompts are replaced

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            draw_epochs_before(self.epoch, self.num_samples, self.generator, self.seed)
        indices: Iterator[int] = super().__iter__()
        return self._replaced(indices) if self.replaced.others else indices

    def _replaced(self, indices: Iterator[int]) -> Iterator[int]:
        window_size = self.batch_size * self.mini_repeat_count * self.repeat_count
        for place, index in enumerate(indices):
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
        client: replaces TRL's.
        costs: records the rewards.
        timeline: the trained timeline. It may begin from a checkpoint of an earlier one.
        replaced: prompts and their replacements.
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
        # Set here, not by accelerate: when several processes resume within an epoch, the sampler is wrapped once
        # more than accelerate looks into.
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
        """Return how many completions of all processes were not refused, and how many of them have a reward.

        Sessions without a turn are left out like refused prompts, but count here: if all are, the agent is broken.
        """
        refused = 0 if self._refused is None or self._sessions is not None else int(self._refused.sum())
        return len(per_function) - refused, int((~torch.isnan(per_function).all(dim=1)).sum())

    def try_prompt(self, prompt: Any) -> None:
        """Tokenize a prompt as a step does.

        Raises ValueError for a token without an embedding, as one that was added to the tokenizer alone, and what
        TRL, transformers and the chat template raise.
        """
        if self.environment_factories is not None:
            return
        largest = max(self._tokenize_prompts([prompt])[0][0], default=0)
        known = self.model.config.get_text_config().vocab_size
        if largest >= known:
            token = self._tokenizer.convert_ids_to_tokens(largest)
            raise ValueError(
                f"{token} is token {largest}, and the model has only {known} embeddings; call "
                "`resize_token_embeddings` on the model, or remove the token from the tokenizer"
            )

    def _log_witnesses(self, per_function: torch.Tensor) -> None:
        """Log scores of reward functions with weight 0 under other names, since TRL does not log weights."""
        for at in (self.reward_weights == 0).nonzero().flatten().tolist():
            self._log_metric(WITNESS + self.reward_func_names[at], torch.nanmean(per_function[:, at]).item())


@contextlib.contextmanager
def _generation_through(client: FleetClient) -> Iterator[None]:
    """Have TRL construct FleetGeneration as its generation backend."""
    original: Callable[..., Any] = grpo_trainer_module.VLLMGeneration
    grpo_trainer_module.VLLMGeneration = functools.partial(FleetGeneration, client)
    try:
        yield
    finally:
        grpo_trainer_module.VLLMGeneration = original


def shards_reference(trainer: Any) -> bool:
    """Whether a synchronised reference model is sharded. No checkpoint would hold it, so that after a restart the
    reference would be the base model again."""
    plugin = trainer.accelerator.state.deepspeed_plugin
    in_shards = trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3)
    return bool(trainer.args.sync_ref_model and in_shards)
