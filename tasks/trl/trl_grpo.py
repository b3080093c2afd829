"""The one module that knows TRL: its GRPOTrainer in server mode, with this project's fleet as the server.

TRL asks a `VLLMClient` for completions and hands it new weights. `tasks.trl.fleet_client` replaces that client, so
TRL's own behaviour stays, including its importance-sampling correction and metrics. An epoch's order becomes a
function of the epoch, so that a restart is exact.

Only this module uses private names of TRL and of transformers' trainer. These are the places where it reaches into
them, read in trl 1.16.0 and transformers 5.19.0. `tests/node/test_trl_contract.py` fails if a release changes one,
or if the code uses one that is missing here.

Overridden, in the order in which TRL calls them, with the object that does the work:

    GRPOTrainer.__init__(model, reward_funcs, args, train_dataset, eval_dataset, processing_class,
            reward_processing_classes, callbacks, optimizers, quantization_config, peft_config, tools,
            rollout_func, environment_factory): FleetGRPOTrainer
        It constructs VLLMGeneration under its name in `trl.trainer.grpo_trainer`, which is replaced meanwhile.
        The parts are constructed last. Else: TRL connects to a server.
    VLLMGeneration.__init__(model, accelerator, processing_class, mode, structured_outputs_regex, server_base_url,
            server_host, server_port, server_timeout, group_port, tensor_parallel_size, gpu_memory_utilization,
            max_model_length, max_num_seqs, enable_sleep_mode, model_impl, trust_remote_code, repetition_penalty,
            temperature, top_p, top_k, min_p, max_completion_length, logprobs, generation_kwargs): FleetGeneration
        It takes the client in addition.
    VLLMGeneration._init_vllm(): FleetGeneration
        The client replaces a connection to a server. Else: the trainer waits for a server.
    GRPOTrainer._get_train_sampler(dataset): EpochSampler
        The order follows from seed and epoch. Else: a restart within a later epoch sees other prompts.
    GRPOTrainer._load_optimizer_and_scheduler(checkpoint): memory
        It loads what TRL keeps in memory only. Else: a restart generates a window again, at another place.
    GRPOTrainer._run_epoch(model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, trial,
            ignore_keys_for_eval, start_time, resume_from_checkpoint, epochs_trained,
            steps_trained_in_current_epoch): EpochSampler
        The sampler gets the epoch before it is iterated. Else: as for `_get_train_sampler`.
    RepeatSampler.__iter__(): EpochSampler
        It draws one permutation from `generator`, seeded at construction. Else: another order than TRL's.
    GRPOTrainer._generate_and_score_completions(inputs): agents, refused, samples
        Around a call: its rows, corrected metrics, samples, rows of further branches. Else: an agent gets the
        rows of another call, and refused prompts count in the metrics.
    GRPOTrainer._generate(prompts): agents, refused, samples
        Conversations replace texts; refused completions leave the loss. The result is `Generated`. Else: other
        fields are masked.
    GRPOTrainer._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations,
            has_tool_images): turns
        All processes take part in each turn. Else: a process waits forever for another one's prompts.
    VLLMGeneration.sync_weights(): Publishing
        TRL calls it before the first completion of a step. The client gets weights and canary, and nothing is
        merged or sent. Else: a policy is published under the name of another step.
    VLLMGeneration.generate(prompts, images, num_generations, profiler): FleetGeneration
        TRL broadcasts the client's answer, so it may ask all processes to do something else first. Else: only the
        first process leaves a machine, or publishes divided weights.
    GRPOTrainer._tool_call_loop(prompts, prompt_ids, completion_ids, completions, logprobs, images,
            multimodal_fields): turns
        It ends when the loops of all processes do. Else: as for `_generate_single_turn`.
    GRPOTrainer._calculate_rewards(inputs, prompts, completions, completion_ids_list): rewards, refused, agents
        Refused and failed completions get NaN; rewards are recorded. The result is of all processes. Else: they
        get an advantage, and a run that learns nothing continues.
    GRPOTrainer._compute_loss(model, inputs): refused
        Metrics of a batch without tokens are removed. Else: they count as 0.
    GRPOTrainer._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time,
            learning_rate): leaving
        It is called after each optimizer step, before the step is saved. Else: a trainer that leaves within a
        step saves a state that no step had.
    GRPOTrainer.evaluate(eval_dataset, ignore_keys, metric_key_prefix): random_state_kept
        The random state is restored. Else: an interrupted evaluation changes the steps after it.
    GRPOTrainer.evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix):
            FleetClient.foresee
        All prompts are announced to the client. Else: an evaluation takes longer.
    GRPOTrainer._save_checkpoint(model, trial): saving, memory
        It saves into a slot of the spool, and what TRL keeps in memory only. Else: a restart is not exact.

Used:

    GRPOTrainer._step, GRPOTrainer._buffered_inputs: `place`
        Batches since the start, and the window that batches are taken from; generated again if None.
    GRPOTrainer._metrics, GRPOTrainer._logs: `metrics`, samples
        Values since the last log by mode and name; the prompts, completions and advantages of all processes.
    GRPOTrainer._log_metric(name, value): agents, rewards
        The value becomes a metric when the present call is scored.
    GRPOTrainer._tokenizer, GRPOTrainer._tokenize_prompts(prompts): `tokenized`
        Its first result is the token ids that a step requests completions of.
    GRPOTrainer._get_output_dir(trial): memory
        TRL's checkpoint is in `checkpoint-STEP` below it.
    GRPOTrainer._load_from_checkpoint(resume_from_checkpoint, model): `load_weights`
        It loads the weights alone, for an evaluation.
    GRPOTrainer.rollout_func, GRPOTrainer.environment_factories, GRPOTrainer.tools, GRPOTrainer.eos_token_ids,
    GRPOTrainer.num_generations, GRPOTrainer.num_generations_eval, GRPOTrainer.num_iterations,
    GRPOTrainer.ref_model, GRPOTrainer.reward_funcs, GRPOTrainer.reward_func_names, GRPOTrainer.reward_weights,
    GRPOTrainer.vllm_generation: the parts
        Set in `__init__`, and not documented. `rollout_func` is called with the prompts and the trainer.
    VLLMGeneration._dist: Publishing
        How the model is divided over processes.
    VLLMGeneration.model, VLLMGeneration.accelerator, VLLMGeneration.vllm_client,
    VLLMGeneration.repetition_penalty, VLLMGeneration.temperature, VLLMGeneration.top_p, VLLMGeneration.top_k,
    VLLMGeneration.min_p, VLLMGeneration.structured_outputs_regex, VLLMGeneration.generation_kwargs:
            FleetGeneration
        Sampling of an agent's turns, the same as of other completions.
    RepeatSampler.data_source, RepeatSampler.mini_repeat_count, RepeatSampler.batch_size,
    RepeatSampler.repeat_count, RepeatSampler.shuffle, RepeatSampler.seed, RepeatSampler.num_samples,
    RepeatSampler.generator: EpochSampler
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import trl.import_utils as trl_imports
from accelerate.utils import broadcast_object_list, gather_object

from grpo_orch.checkpoint.records.rollouts import Session
from grpo_orch.policies.model.spec import STALE_DEFAULTS
from grpo_orch.tasks.machine.leaving import LeaveNow
from grpo_orch.tasks.storing.step_costs import StepCosts
from grpo_orch.tasks.trl import fast_save
from grpo_orch.tasks.trl.fleet_client import FleetClient, Instead
from grpo_orch.tasks.trl.parts.agents import Sessions, rollout_func
from grpo_orch.tasks.trl.parts.checkpointing import MemoryState, Place, Saving
from grpo_orch.tasks.trl.parts.leave_in_time import Departure, random_state_kept
from grpo_orch.tasks.trl.parts.publishing import Publishing
from grpo_orch.tasks.trl.parts.refused import RefusedCompletions
from grpo_orch.tasks.trl.parts.rewards import RewardAccount
from grpo_orch.tasks.trl.parts.samples import Samples
from grpo_orch.tasks.trl.parts.tool_turns import CommonTurns
from grpo_orch.tasks.trl.skipped_prompts import ReplacedPrompts, Walk, draw_epochs_before, walk_of

# TRL imports vLLM wherever it is installed. The trainer does not use it, and the import would take longer than the
# rest of a restart.
trl_imports.is_vllm_available = lambda **_: False

import trl.trainer.grpo_trainer as grpo_trainer_module  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.generation.vllm_generation import VLLMGeneration  # noqa: E402
from trl.trainer.utils import RepeatSampler  # noqa: E402

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
    """TRL's generation backend over the fleet."""

    def __init__(self, client: FleetClient, *args: Any, **kwargs: Any) -> None:
        self._fleet_client = client
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        self.vllm_client = self._fleet_client
        self._publishing = Publishing(self.model, self.accelerator, self._dist, self._fleet_client)
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
                self._publishing.publish()
            case Instead.LEAVING:
                raise LeaveNow

    def sync_weights(self) -> None:
        """Hand the weights over. Nothing is merged or sent."""
        self._publishing.hand_over()


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


class Generated(NamedTuple):
    """Result of `GRPOTrainer._generate`, in its order."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_mask: list[list[int]] | None
    completions: list[Any]
    logprobs: list[list[float | None]]
    extra_fields: dict[str, list[Any]]
    images: Any
    tool_images: Any


@dataclass(frozen=True, slots=True)
class Made:
    """Completions of some rows: `completions` in the form for reward functions, `ids` as tokens."""

    prompts: list[Any]
    completions: list[Any]
    ids: list[list[int]]


class _Completed(Exception):
    """Carries completions out of TRL, which would go on and compute the inputs of a loss."""

    def __init__(self, made: Made) -> None:
        super().__init__()
        self.made = made


class FleetGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # it has no types
    """GRPOTrainer whose completions come from the fleet and whose restarts are exact.

    It overrides each of TRL's methods once, in the order in which TRL calls them, and hands the work to its parts.
    No part knows TRL.

    Args:
        client: replaces TRL's.
        costs: records the rewards.
        timeline: the trained timeline. It may begin from a checkpoint of an earlier one.
        replaced: prompts and their replacements.
    """

    def __init__(
        self, client: FleetClient, costs: StepCosts, timeline: int, replaced: ReplacedPrompts, **kwargs: Any
    ) -> None:
        with _generation_through(client):
            super().__init__(**kwargs)
        self.fleet, self.replaced = client, replaced
        self.walk = walk_of(self.args, len(self.train_dataset))
        end, padding = self.eos_token_ids[0], self._tokenizer.pad_token_id
        ends = {*self.eos_token_ids, padding}
        functions, weights = self.reward_func_names, self.reward_weights
        self.saving = Saving(costs)
        self.memory = MemoryState(self.accelerator, self.args, self.walk, timeline)
        self.leaving = Departure(self.accelerator, costs, self.saving)
        self.agents = Sessions(
            self.accelerator,
            self.vllm_generation.run_agents,
            self._log_metric,
            has_agent=self.rollout_func is rollout_func,
            end=end,
            padding=padding,
            batches=self.args.steps_per_generation,
            group=self.num_generations,
        )
        self.turns = CommonTurns(self.accelerator)
        self.refused = RefusedCompletions(self.accelerator, end, ends)
        self.rewards = RewardAccount(costs, functions, weights, self._log_metric)
        self.samples = Samples(self.accelerator, ends, functions, weights.tolist(), self.num_generations, timeline)
        self._completes_only = False

    # Before the first step.

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        theirs = super()._get_train_sampler(dataset)
        self._sampler = EpochSampler(
            data_source=theirs.data_source,
            mini_repeat_count=theirs.mini_repeat_count,
            batch_size=theirs.batch_size,
            repeat_count=theirs.repeat_count,
            shuffle=theirs.shuffle,
            seed=theirs.seed,
        )
        self._sampler.replaced, self._sampler.walk = self.replaced, self.walk
        return self._sampler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            step, schedule = self.state.global_step, (self.optimizer, self.lr_scheduler)
            self.place = self.memory.load(Path(checkpoint), step, *schedule, self._synchronised_reference())

    def _run_epoch(self, *, epoch: int, **rest: Any) -> None:
        # Set here, not by accelerate: when several processes resume within an epoch, the sampler is wrapped once
        # more than accelerate looks into.
        self._sampler.epoch = epoch
        super()._run_epoch(epoch=epoch, **rest)

    # A generation window: once in several steps, or several times in a step.

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.agents.begin(inputs)
        score = super()._generate_and_score_completions
        output: dict[str, Any] = score(inputs)
        self.agents.drop_ends(self.metrics)
        self.refused.correct_scores(self.metrics)
        rollouts, self.fleet.trained_on = self.fleet.trained_on, []
        if not self.model.training:
            return output
        self.samples.keep(self.state.global_step, output, self._logs, rollouts)
        further = self.agents.further(output["advantages"], self.metrics)
        if further is None:
            return output
        with self._discarded_logs():
            return self.agents.extended(output, further, score)

    def _generate(self, prompts: list[Any]) -> Generated:
        made = Generated(*super()._generate(self.agents.prompts(prompts)))
        completions = self.agents.completions(prompts, made.completions)
        prompt_ids, mask = self.refused.leave_out(
            made.prompt_ids, made.completion_ids, made.tool_mask, made.logprobs, self.metrics
        )
        self.samples.note_completions(made.completion_ids, mask)
        if self._completes_only:
            raise _Completed(Made(prompts, completions, made.completion_ids))
        return made._replace(prompt_ids=prompt_ids, tool_mask=mask, completions=completions)

    def _generate_single_turn(self, prompt_ids: list[list[int]], *rest: Any, **named: Any) -> Any:
        generate = super()._generate_single_turn
        return self.turns.generate(prompt_ids, lambda filled: generate(filled, *rest, **named))

    def _tool_call_loop(self, *args: Any) -> Any:
        loop, generate = super()._tool_call_loop, super()._generate_single_turn
        return self.turns.loop(lambda: loop(*args), lambda filled: generate(filled, None, {}, 1))

    def _calculate_rewards(self, inputs: list[Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.agents.are_extended:
            rows = len(inputs) * self.accelerator.num_processes
            return torch.zeros((rows, len(self.reward_funcs)), device=self.accelerator.device)
        began_s = time.monotonic()
        found: torch.Tensor = super()._calculate_rewards(inputs, *args, **kwargs)
        per_function = self.agents.without_failed(self.refused.without_rewards(found))
        if self.model.training:
            # Sessions without a turn are left out like refused prompts, but count here: if all are, the agent is
            # broken.
            refused = 0 if self.agents.have_run else self.refused.count
            self.rewards.note_training(per_function, refused, time.monotonic() - began_s)
        self.rewards.log_witnesses(per_function)
        self.samples.note_rewards(per_function)
        return per_function

    # A batch.

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        with self.refused.without_empty_loss(inputs, self.metrics):
            loss: torch.Tensor = super()._compute_loss(model, inputs)
        return loss

    # The end of a step.

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, evaluate and save as TRL does, and leave if there may be no time for another step."""
        self.leaving.note_step(self.place)
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.state.global_step < self.state.max_steps:
            self.leaving.check(in_step=False)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as TRL does. An evaluation, complete or not, must not change the steps after it."""
        with random_state_kept():
            return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        is_one_turn = not self.tools and self.rollout_func is None and self.environment_factories is None
        if self.accelerator.is_main_process and self.fleet.foresees and is_one_turn:
            self.fleet.foresee(self.tokenized([row["prompt"] for row in dataloader.dataset]))
        try:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self.fleet.foresee([])

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        save, step = super()._save_checkpoint, self.state.global_step

        def write() -> None:
            with fast_save.overwriting():
                save(model, trial)
                folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{step}"
                self.memory.save(folder, self.place, self._synchronised_reference())

        self.saving.save(step, write, is_last=self.leaving.has_begun or step >= self.state.max_steps)

    # For the parts, and for the modules that assemble a trainer or an evaluator.

    @property
    def place(self) -> Place:
        """TRL's place in the run."""
        is_within_window = self._step % (self.args.steps_per_generation * self.num_iterations)
        return Place(self._step, self._buffered_inputs if is_within_window else None)

    @place.setter
    def place(self, place: Place) -> None:
        self._step, self._buffered_inputs = place.batches, place.buffered

    @property
    def metrics(self) -> dict[str, list[float]]:
        """TRL's metrics since its last log, of training or of the evaluation that runs."""
        metrics: dict[str, list[float]] = self._metrics["train" if self.model.training else "eval"]
        return metrics

    def tokenized(self, prompts: list[Any]) -> list[list[int]]:
        """Return prompts as token ids, as a step does."""
        return [list(ids) for ids in self._tokenize_prompts(prompts)[0]]

    def save_before_leaving(self) -> int | None:
        """Save the end of the last step, unless it is stored already or not worth it. Call it in every process.

        Returns, in the first process, the step of the newest checkpoint that is stored or on its way to the store,
        if any.
        """
        place = self.leaving.begin(self.state.global_step)
        if place is not None:
            self.place = place
            self._save_checkpoint(self.model, trial=None)
        return None if self.saving.checkpoints is None else self.saving.checkpoints.sealed_step or None

    def load_weights(self, folder: Path) -> None:
        """Load the weights in a checkpoint's folder."""
        self._load_from_checkpoint(str(folder))

    def complete(self, rows: list[dict[str, Any]]) -> Made:
        """Complete the rows' prompts together; with tools or environments, turn by turn."""
        self._completes_only = True
        try:
            self._generate_and_score_completions(rows)  # it prepares environments and tools
        except _Completed as completed:
            return completed.made
        finally:
            self._completes_only = False
        raise RuntimeError("TRL has completed no prompt")

    def score(self, rows: list[dict[str, Any]], made: Made) -> torch.Tensor:
        """Return the completions' rewards, of shape (completions, functions)."""
        return self._calculate_rewards(rows, made.prompts, made.completions, made.ids)

    def _synchronised_reference(self) -> Any:
        """Return the reference model, if it follows the trained one; otherwise None."""
        return self.accelerator.unwrap_model(self.ref_model) if self.args.sync_ref_model else None

    @contextlib.contextmanager
    def _discarded_logs(self) -> Iterator[None]:
        """Discard what TRL counts and logs within the context."""
        saved: tuple[Any, Any, Any] = self._metrics, self._logs, self.state.num_input_tokens_seen
        self._metrics: Any = {mode: defaultdict(list) for mode in saved[0]}
        self._logs: Any = {
            name: defaultdict(deque) if isinstance(value, dict) else deque() for name, value in saved[1].items()
        }
        try:
            yield
        finally:
            self._metrics, self._logs, self.state.num_input_tokens_seen = saved


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
