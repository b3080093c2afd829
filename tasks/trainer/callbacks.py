"""Callbacks that write heartbeat, metrics, samples and checkpoints to the run store, and watch for divergence.

Each is a small `transformers.TrainerCallback`. Only the main process has them, except CheckpointCallback.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
from transformers import TrainerCallback

from grpo_orch.checkpoint.records import metrics, rollouts
from grpo_orch.checkpoint.records.metrics import NONFINITE, MetricsRow, read_chunk
from grpo_orch.checkpoint.records.samples import SampleWriter
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.detect.divergence import Detector, Health, Verdict, follow, trip_at
from grpo_orch.policies.detect.symptoms import NO_VARIANCE
from grpo_orch.policies.model.spec import KlPolicy
from grpo_orch.tasks.machine.leaving import Leaving
from grpo_orch.tasks.storing.heartbeat import Heartbeat
from grpo_orch.tasks.storing.saving import CheckpointSaver
from grpo_orch.tasks.storing.step_costs import StepCosts

log = structlog.get_logger()

SUMMED_KEYS = (  # summed over a row's logs
    metrics.TOKENS,
    metrics.TOKENS_DISCARDED,
    metrics.WAIT_S,
    metrics.GENERATE_S,
    metrics.GENERATE_NODE_S,
    metrics.AHEAD_S,
    metrics.UNSERVED_S,
    metrics.REWARDS_S,
    metrics.STORE_S,
    metrics.PROMPTS_REFUSED,
)
# Entries kept in transformers' log history, which it writes as text with each checkpoint: 100,000 steps of thirty
# numbers each took 17 s and 154 MB. The run's metrics have all entries.
LOGS_KEPT = 1000
LOGGED = ("reward", "eval_reward", "kl", "loss", "grad_norm")  # metrics in the trainer's own log


class HeartbeatCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Updates the heartbeat, and stops a replaced trainer at its next step."""

    def __init__(self, heartbeat: Heartbeat, checkpoints: CheckpointSaver, leaving: Leaving) -> None:
        self._heartbeat = heartbeat
        self._checkpoints = checkpoints
        self._leaving = leaving

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._checkpoints.start_from(state.global_step, state.logging_steps)
        self._leaving.begin(self._checkpoints.last_store_s)
        # Rollout nodes are bought once the trainer is `training`. Until the first request for completions, the
        # first step may still fail because of a mistake in run.yaml.
        activity = "training" if state.global_step else None
        self._heartbeat.update(activity, step=state.global_step, max_steps=state.max_steps)

    def on_step_begin(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self._heartbeat.check()

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._heartbeat.update(step=state.global_step, stored_step=self._checkpoints.stored_step())

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        kl = logs.get("kl")
        if kl is not None and math.isfinite(kl):
            self._heartbeat.update(kl=kl)


class MetricsCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Stores TRL's logs, one row per step. Several logs of a step, as with evaluation, share the row."""

    def __init__(self, store: Store, costs: StepCosts, timeline: int, attempt: int) -> None:
        self._store = store
        self._writer = metrics.MetricsWriter(store)
        self._costs = costs
        self._timeline = timeline
        self._attempt = attempt
        self._step = -1
        self._values: dict[str, float] = {}
        self._unused_generation: dict[str, float] = {}  # for the timeline's first row

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._step = state.global_step
        key = layout.metrics_chunk(self._timeline, self._step)  # reading all rows of a long run would be too much
        rows = metrics.read_chunk(self._store, key)
        self._values = next((dict(row.values) for row in rows if row.step == self._step), {})
        if self._timeline and self._is_timeline_start():
            windows, tokens = rollouts.unused_windows(self._store, self._timeline - 1)
            self._unused_generation = {metrics.UNUSED_WINDOWS: windows, metrics.UNUSED_TOKENS: tokens}

    def _is_timeline_start(self) -> bool:
        """Return True if the timeline has no row that this trainer continues from."""
        chunks = self._store.entries(layout.metrics(self._timeline))
        rows = metrics.read_chunk(self._store, chunks[0].key) if chunks else []
        return all(row.step > self._step for row in rows)

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        if state.global_step != self._step:
            self._step, self._values = state.global_step, {}
        self._values.update(self._unused_generation)
        self._unused_generation = {}
        for name, value in self._costs.take().items():
            adds_up = name in SUMMED_KEYS
            self._values[name] = round(value + self._values.get(name, 0.0), 6) if adds_up else value
        self._values.update(storable(logs))
        logged = {name: self._values[name] for name in LOGGED if name in logs and name in self._values}
        if logged:
            log.info("step", step=self._step, **logged)
        self._writer.append(MetricsRow(self._timeline, self._step, time.time(), self._attempt, dict(self._values)))


class SamplesCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Writes the last samples before the trainer exits."""

    def __init__(self, samples: SampleWriter) -> None:
        self._samples = samples

    def on_train_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self._samples.finish()


class Diverged(Exception):
    """The detector has tripped: this step must not be saved, and training must stop."""

    def __init__(self, verdict: Verdict) -> None:
        evidence = "; ".join(verdict.evidence) or "no evidence was kept"
        super().__init__(f"the run diverges since step {verdict.onset_step}: {evidence}")


class DivergenceCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Watches for divergence after the row is stored, so that the store has the data behind each verdict.

    Args:
        heartbeat: receives the verdict.
        rule: the run's, with the limits and the action to take.
        detector: its state in the checkpoint that training resumes from.
    """

    def __init__(self, heartbeat: Heartbeat, rule: KlPolicy, detector: Detector) -> None:
        self._heartbeat = heartbeat
        self._rule = rule
        self.detector = detector

    def on_train_begin(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self._heartbeat.update(verdict=self.detector.verdict)

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        point = metrics.point_at(state.global_step, storable(logs))
        try:
            detector = follow(self.detector, point, self._rule.limit, self._rule.task_changes)
        except Exception:  # an error here must not end training; the daemon runs the same detector and reports it
            log.exception("detector_failed", step=point.step)
            return
        self._take(detector)

    def trip_on_nan_policy(self, step: int, onset_step: int) -> None:
        """Trip because the weights of `step` give NaN: they yield no completions, so nothing would be logged.

        Raises Diverged.
        """
        self._take(trip_at(self.detector, step, onset_step, "the policy's log-probabilities are not numbers"))

    def _take(self, detector: Detector) -> None:
        before, self.detector = self.detector.verdict, detector
        verdict = detector.verdict
        self._heartbeat.update(verdict=verdict)
        if verdict.health is not before.health:
            log.warning("verdict", health=verdict.health, onset_step=verdict.onset_step, evidence=verdict.evidence)
        if verdict.health is Health.TRIPPED and self._rule.action != "alert":
            raise Diverged(verdict)


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Saves the last step, retries a save for which the spool had no space, and bounds the saved log history.

    Runs in every process.

    Args:
        save_is_due: returns True if a save had no space.
        leave_if_due: raises LeaveNow in the middle of a step if the trainer must exit.
    """

    def __init__(self, save_is_due: Callable[[], bool], leave_if_due: Callable[[], None]) -> None:
        self._save_is_due = save_is_due
        self._leave_if_due = leave_if_due

    def on_log(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        del state.log_history[:-LOGS_KEPT]

    def on_substep_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self._leave_if_due()

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= state.max_steps or self._save_is_due():
            control.should_save = True


def storable(logs: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a log that JSON can represent, with a marker for each other value."""
    values: dict[str, float] = {}
    for name, value in logs.items():
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            values[metrics.NONFINITE + name] = 1.0
        elif isinstance(value, int | float):
            values[name] = float(value)
    return values


REWARD = "reward"
ALL = 1.0 - 1e-6  # tolerance for a mean of shares that are all 1


@dataclass(frozen=True, slots=True)
class RewardCounts:
    """Counts of logged training rows, up to the first row that could teach something."""

    rows: int = 0
    rewarded: int = 0  # rows with a reward for some completion
    varied: int = 0  # rows with a group whose rewards differ


def count_rewards(store: Store) -> RewardCounts:
    """Count the run's metric rows up to the first row that could teach something. Raises StoreError."""
    rows = rewarded = 0
    for entry in store.entries(layout.METRICS):
        for row in read_chunk(store, entry.key):
            has_reward = REWARD in row.values
            if has_reward and row.values.get(NO_VARIANCE, 0.0) < ALL:
                return RewardCounts(rows + 1, rewarded + 1, 1)
            rows += has_reward or NONFINITE + REWARD in row.values
            rewarded += has_reward
    return RewardCounts(rows, rewarded, 0)
