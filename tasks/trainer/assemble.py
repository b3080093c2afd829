"""Assemble a trainer: the user's model, data and rewards, TRL's trainer, and its connections to the run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import structlog
from transformers import PrinterCallback, set_seed
from transformers.utils.logging import disable_progress_bar

from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.records.samples import SampleWriter
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream.manifest import files_below
from grpo_orch.checkpoint.stream.spool import Spool
from grpo_orch.policies.detect.divergence import Detector
from grpo_orch.policies.model.node_contract import SPOOL
from grpo_orch.policies.model.spec import AgentSpec, RunSpec, generates_itself
from grpo_orch.policies.model.timelines import Fork, forked_spec
from grpo_orch.policies.model.vocabulary import Precedence
from grpo_orch.policies.weights.adapters import QUANTISED, adapter_obstacle, engine_type
from grpo_orch.policies.weights.tensors import ServedTypes
from grpo_orch.tasks.agents.processes import AgentHost, AgentStartError
from grpo_orch.tasks.agents.runner import AgentRunner, AgentSource, Limits
from grpo_orch.tasks.agents.session_client import SessionClient
from grpo_orch.tasks.completions.gateway_client import GatewayClient
from grpo_orch.tasks.completions.refused_prompts import RefusedPrompts
from grpo_orch.tasks.completions.rollout_source import RolloutSource
from grpo_orch.tasks.machine.base_model import identity_of, model_config, model_folder
from grpo_orch.tasks.machine.leaving import Leaving
from grpo_orch.tasks.machine.node_env import NodeEnv
from grpo_orch.tasks.machine.spooling import SpoolFull, make_spool
from grpo_orch.tasks.storing.heartbeat import Heartbeat
from grpo_orch.tasks.storing.publish import AdapterPublisher, PolicyPublisher
from grpo_orch.tasks.storing.restoring import BASE_MODEL, Restored
from grpo_orch.tasks.storing.saving import CheckpointSaver, read_detector
from grpo_orch.tasks.storing.step_costs import StepCosts
from grpo_orch.tasks.storing.tensors import read_served_types
from grpo_orch.tasks.trainer import callbacks
from grpo_orch.tasks.trainer.preflight import (
    check_lengths,
    check_packages,
    check_prompts,
    check_rewards,
    check_row_count,
    check_tokens,
)
from grpo_orch.tasks.trainer.reports import keep_reports, name_reports, prepare_reports
from grpo_orch.tasks.trainer.start import Start
from grpo_orch.tasks.trainer.turns import check_turns, guarded_turns, load_turns
from grpo_orch.tasks.trainer.user_data import load_data, prompts_used
from grpo_orch.tasks.trainer.user_objects import (
    BadSpec,
    first_line,
    guarded_rewards,
    load_rewards,
    local_folder,
    model_path,
    passes,
)
from grpo_orch.tasks.trl import trl_grpo
from grpo_orch.tasks.trl.fleet_client import FleetClient
from grpo_orch.tasks.trl.own_generation import OwnGeneration
from grpo_orch.tasks.trl.parts import agents
from grpo_orch.tasks.trl.parts.checkpointing import why_not_resumable
from grpo_orch.tasks.trl.parts.refused import row_of
from grpo_orch.tasks.trl.skipped_prompts import ReplacedPrompts, Walk, replacements, walk_of
from grpo_orch.tasks.trl.weights import checkpoint_bytes, plain_model
from grpo_orch.tasks.trl.windows_ahead import WindowsAhead

log = structlog.get_logger()

Source = OwnGeneration | GatewayClient | AgentRunner
FIRST: Precedence = (0, 1, 1)  # of a run's first trainer
SAMPLES_RETRY_S = 30.0  # nothing depends on samples, so do not wait longer
SAVES_BEHIND_MAX = 10  # without `checkpoints.max_behind_steps`: how many saves the store may be behind


def assemble(
    env: NodeEnv,
    record: RunRecord,
    store: Store,
    heartbeat: Heartbeat,
    leaving: Leaving,
    restored: Restored | None,
    forks: Sequence[Fork] = (),
    base_model: Path | None = None,
) -> tuple[Any, Spool | None]:
    """Return a trainer that is ready to train and, in the first process, its spool.

    Raises BadSpec for mistakes that only the user can repair.

    Args:
        record: the run's record, with the specification of timeline 0.
        forks: the origins of the other timelines.
        base_model: its folder on this machine, if it is neither the run's own folder nor in the hub's cache.
    """
    disable_progress_bar()  # useless in a log file
    datasets.disable_progress_bars()
    timeline_record = replace(record, spec=_spec_on(record.spec, forks, env.timeline))
    start = Start(env, timeline_record, store, heartbeat, leaving, restored, base_model, StepCosts())
    config = grpo_config(
        start.spec, Path(env.workdir) / SPOOL, evaluates=start.spec.trainer.eval_dataset is not None
    )
    refused = RefusedPrompts(start.spec.policies.on_bad_prompt, start.costs)
    own = OwnGeneration(env.node, start.check_stop)
    source = _source(start, own, config)
    client = FleetClient(_rollouts(start, refused, config.seed, source))
    client.foresees = source is not own
    replaced = functools.partial(_replaced_prompts, record.spec, forks, env.timeline)
    trainer = _trainer(start, client, config, replaced)
    refused.row_of = functools.partial(row_of, trainer)
    own.attach(trainer)
    first = trainer.is_world_process_zero()
    publisher = (own if source is own else policy_publisher(start, trainer)) if first else None
    client.attach(trainer, publisher, env.timeline)
    wanted = start.spec.trainer
    knows_prompts = wanted.environment_factory is None and wanted.rollout_func is None
    if source is not own and knows_prompts:
        staleness = start.spec.rollout.max_staleness
        first_step = _first_step(forks, env.timeline)
        prompts_of = None if wanted.agent is None else agents.plain_rows
        windows = WindowsAhead(trainer, env.timeline, first_step, staleness, prompts_of)
        client.windows = windows if windows.helps else None
    trainer.remove_callback(PrinterCallback)  # MetricsCallback logs the same in one line instead of thirty
    leave_if_due = functools.partial(trainer.leaving.check, in_step=True)
    trainer.add_callback(callbacks.CheckpointCallback(lambda: trainer.saving.is_due, leave_if_due))
    spool = _spool(Path(env.workdir), start.spec, trainer)
    if spool is not None:
        timeline_id = f"{record.run_id}-t{env.timeline}"
        keep_reports(trainer, Path(env.workdir), timeline_id, is_first=env.precedence == FIRST)
        _add_main_callbacks(start, trainer, client, spool)
    return trainer, spool


def _source(start: Start, own: OwnGeneration, config: Any) -> Source:
    """Return the source of the run's completions: an agent on rollout nodes, the trainer, or rollout nodes."""
    if start.spec.trainer.agent is not None:
        return _agent_runner(start, start.spec.trainer.agent, config)
    if generates_itself(start.spec):
        return own
    return GatewayClient(start.store, start.env.token, start.heartbeat, start.leaving.check)


def _agent_runner(start: Start, agent: AgentSpec, config: Any) -> AgentRunner:
    """Return the agent's runner. The first process imports the agent. Raises BadSpec."""
    memory_bytes = None if agent.memory_gb is None else int(agent.memory_gb * 1e9)
    runner = AgentRunner(
        SessionClient(start.store, start.env.token, start.env.precedence),
        AgentHost(agent.run, start.workdir, memory_bytes, agent.python),
        Limits(agent.time_s, agent.turns, agent.tokens or config.max_completion_length),
        start.heartbeat,
        start.check_stop,
    )
    if config.process_index == 0:
        try:
            with start.limited("trainer.agent: importing it"):
                runner.start()
        except AgentStartError as error:
            raise BadSpec(f"trainer.agent: {agent.run}: {error}") from error
    return runner


def _rollouts(start: Start, refused: RefusedPrompts, run_seed: int, source: Source) -> RolloutSource:
    kind: Callable[..., RolloutSource] = RolloutSource
    if isinstance(source, AgentRunner):
        kind = functools.partial(AgentSource, source, start.spec.policies.on_bad_reward)
    return kind(
        start.store,
        source,
        start.heartbeat,
        start.costs,
        refused,
        by=start.env.precedence,
        run_seed=run_seed,
        deadline_s=start.spec.rollout.deadline_s,
        recovery=start.spec.rollout.recovery,
        check_stop=start.check_stop,
    )


def _trainer(start: Start, client: FleetClient, config: Any, replaced: Callable[[int], ReplacedPrompts]) -> Any:
    """Build TRL's trainer from the objects that run.yaml names. Raises BadSpec.

    Args:
        replaced: returns the replaced prompts, given the number of rows.
    """
    wanted, workdir = start.spec.trainer, start.workdir
    with start.limited("trainer: importing what run.yaml names"):
        rewards, turns = load_rewards(wanted, workdir), load_turns(wanted, workdir)
    by_agent = [] if wanted.agent is None else [agents.agent]
    rows_used = prompts_used(config)
    data = load_data("trainer.dataset", wanted.dataset, workdir, rows_used)
    held_out = wanted.eval_dataset and load_data("trainer.eval_dataset", wanted.eval_dataset, workdir, rows_used)
    check_packages(config)
    name_reports(config, start.spec.name, start.record.run_id, start.env.timeline)
    prepare_reports(config, Path(start.env.workdir))
    check_row_count(len(data.rows), config)
    first_rows = {**data.firsts, **(held_out.firsts if held_out else {})}
    if start.restored is None and config.process_index == 0:
        check_prompts(first_rows)
        environments = check_turns(turns, first_rows, config.num_generations, start.limited)
        columns = {} if wanted.agent is None else agents.example_columns(config.num_generations)
        check_rewards(rewards, wanted.reward_funcs, first_rows, config, start.limited, environments, columns)
    trainer = build_trainer(
        start,
        client,
        config,
        replaced(len(data.rows)),
        reward_funcs=[*guarded_rewards(rewards, start.spec), *by_agent],
        train_dataset=data.rows,
        eval_dataset=held_out.rows if held_out else None,
        **guarded_turns(turns, start.spec),
        **({} if wanted.agent is None else {"rollout_func": agents.rollout_func}),
    )
    if start.restored is None:
        check_lengths(start.spec, config.max_completion_length, plain_model(trainer.model).config.to_dict())
        check_tokens(trainer, first_rows, wanted.model)
    if start.restored is not None and (why := why_not_resumable(trainer, start.restored.folder)):
        raise BadSpec(f"trainer: {why}")
    quantised = getattr(plain_model(trainer.model).config, "quantization_config", None)
    if quantised and not generates_itself(start.spec):
        raise BadSpec(f"trainer.model {wanted.model}: {QUANTISED}; name the one it was made from")
    if trl_grpo.shards_reference(trainer):
        shards = "a reference model in shards (FSDP, ZeRO stage 3) does not survive a restart"
        raise BadSpec(f"grpo.sync_ref_model: {shards}; use ZeRO stage 0 to 2 or DDP")
    return trainer


def build_trainer(
    start: Start, client: FleetClient, config: Any, replaced: ReplacedPrompts, **given: Any
) -> trl_grpo.FleetGRPOTrainer:
    """Load the base model and build TRL's trainer of it with the arguments `given`. Raises BadSpec."""
    wanted = start.spec.trainer
    set_seed(config.seed)  # before the model: a restart must draw the same random adapters
    try:
        return trl_grpo.FleetGRPOTrainer(
            client,
            start.costs,
            start.env.timeline,
            replaced,
            model=_model_path(start),
            args=config,
            peft_config=_lora_config(wanted.peft),
            **given,
        )
    except (OSError, ValueError, TypeError, ImportError) as error:
        if passes(error):
            raise
        raise BadSpec(f"trainer.model {wanted.model}, with the settings of `grpo`: {first_line(error)}") from error


def _model_path(start: Start) -> str:
    return model_path(start.spec.trainer, start.workdir) if start.base_model is None else str(start.base_model)


def policy_publisher(start: Start, trainer: Any) -> PolicyPublisher:
    """Return the publisher of policies: only the adapter if the nodes' engine can apply it."""
    folder, config = Path(start.env.workdir) / "policy", plain_model(trainer.model).config
    revision = (trainer.args.model_init_kwargs or {}).get("revision")
    path = _model_path(start)
    own_config = model_config(path, revision=revision)
    why = adapter_obstacle(start.spec, own_config or config.to_dict())
    if start.spec.trainer.peft is not None:
        log.info(
            "policy_publishing_chosen",
            what="whole, the adapter merged" if why else "the adapter alone",
            reason=why,
        )
    by = start.env.precedence
    if why:
        base_model = start.base_model or local_folder(start.spec.trainer, start.workdir)
        served = read_served_types(start.spec.rollout.vllm, base_model)
        return PolicyPublisher(start.store, config, folder, by, served, start.costs)
    base = model_folder(path, revision=revision)
    adapter = trainer.model.peft_config["default"].to_dict()
    identity = "" if base is None else identity_of(base)
    model = start.spec.trainer.model
    # Not the loaded model's configuration: TRL has set the training type in it.
    rounded = ServedTypes(None if own_config is None else engine_type(start.spec, own_config))
    return AdapterPublisher(start.store, adapter, model, identity, folder, by, rounded, start.costs)


def _add_main_callbacks(start: Start, trainer: Any, client: FleetClient, spool: Spool) -> None:
    """Add the duties of the first process: checkpoints, heartbeat, metrics, detector."""
    spec, heartbeat, timeline, attempt = start.spec, start.heartbeat, start.env.timeline, start.env.attempt
    detector = read_detector(start.restored.folder) if start.restored is not None else Detector()
    divergence = callbacks.DivergenceCallback(heartbeat, spec.policies.kl, detector)
    client.on_policy_gone = divergence.trip_on_nan_policy
    checkpoints = CheckpointSaver(
        spool,
        heartbeat,
        start.record,
        timeline,
        frozen=_frozen(trainer, start.base_model or local_folder(spec.trainer, start.workdir)),
        max_behind_steps=spec.checkpoints.max_behind_steps or SAVES_BEHIND_MAX * int(trainer.args.save_steps),
        detector=lambda: divergence.detector,
    )
    trainer.saving.attach(checkpoints, start.leaving)
    trainer.samples.writer = SampleWriter(Store(start.store.url, retry_s=SAMPLES_RETRY_S), start.env.precedence)
    trainer.add_callback(callbacks.SamplesCallback(trainer.samples.writer))
    trainer.add_callback(callbacks.HeartbeatCallback(heartbeat, checkpoints, start.leaving))
    trainer.add_callback(callbacks.MetricsCallback(start.store, start.costs, timeline, attempt))
    # After the metrics, so that the detector's data is in the store before it stops the trainer.
    trainer.add_callback(divergence)


def _spool(workdir: Path, spec: RunSpec, trainer: Any) -> Spool | None:
    """Make the machine's spool in the first process."""
    spool, first = None, trainer.is_world_process_zero()
    weights_bytes, optimizer_bytes = checkpoint_bytes(trainer)
    try:
        with trainer.accelerator.main_process_first():
            if first:
                spool = make_spool(workdir, spec.checkpoints, weights_bytes + optimizer_bytes)
    except SpoolFull as error:
        raise BadSpec(str(error)) from error
    return spool


def _first_step(forks: Sequence[Fork], timeline: int) -> int:
    """Return the step of the first policy on a timeline."""
    fork = next((fork for fork in forks if fork.timeline == timeline), None)
    return 0 if fork is None or fork.start_at is None else fork.start_at.step


def _spec_on(spec: RunSpec, forks: Sequence[Fork], timeline: int) -> RunSpec:
    return forked_spec(spec, next((fork for fork in forks if fork.timeline == timeline), None))


def _replaced_prompts(spec: RunSpec, forks: Sequence[Fork], timeline: int, prompts: int) -> ReplacedPrompts:
    """Return the timeline's replaced prompts. Assumes that earlier timelines had as many processes as this one."""

    def walk(walked_timeline: int) -> Walk:
        return walk_of(grpo_config(_spec_on(spec, forks, walked_timeline), Path(), evaluates=False), prompts)

    return replacements(forks, timeline, walk)


def _frozen(trainer: Any, base_model: Path | None) -> dict[str, Path]:
    """Return the initial model's files if a restart needs them: for the KL, or under adapters."""
    needed = trainer.beta != 0 or hasattr(trainer.model, "get_base_model")
    if base_model is None or not needed:
        return {}
    return {f"{BASE_MODEL}/{name}": path for name, path in files_below(base_model)}


def grpo_config(spec: RunSpec, output_dir: Path, *, evaluates: bool) -> Any:
    try:
        return trl_grpo.build_config(
            spec.grpo, output_dir, evaluates=evaluates, max_staleness=spec.rollout.max_staleness
        )
    except (ValueError, TypeError) as error:
        raise BadSpec(f"grpo: {first_line(error).removeprefix('GRPOConfig.__init__() ')}") from error


def _lora_config(values: dict[str, Any] | None) -> Any:
    if values is None:
        return None
    from peft import LoraConfig

    try:
        return LoraConfig(**values)
    except (ValueError, TypeError) as error:
        raise BadSpec(f"trainer.peft: {first_line(error).removeprefix('LoraConfig.__init__() ')}") from error
