"""What the trainer tells the run store while it trains: heartbeat, metrics, checkpoints. Its guard.

One small callback each, in the signature of `transformers.TrainerCallback`. Only the main process has them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import structlog
from transformers import TrainerCallback

from checkpoint.records import metrics, rollouts
from checkpoint.records.metrics import Row
from checkpoint.store import layout
from checkpoint.store.run_store import Store
from policies.detect.divergence import Detector, Health, Verdict, follow, trip_at
from policies.model.spec import KlPolicy
from tasks.machine.leaving import Leaving
from tasks.storing.heartbeat import Heartbeat
from tasks.storing.sample_writer import SampleWriter
from tasks.storing.saving import CheckpointSaver
from tasks.storing.step_costs import StepCosts

log = structlog.get_logger()

ADD_UP = (  # over a row's logs
    metrics.TOKENS,
    metrics.TOKENS_DISCARDED,
    metrics.WAIT_S,
    metrics.GENERATE_S,
    metrics.GENERATE_NODE_S,
    metrics.AHEAD_S,
    metrics.OWN_GENERATE_S,
    metrics.UNSERVED_S,
    metrics.REWARDS_S,
    metrics.STORE_S,
    metrics.PROMPTS_REFUSED,
)
# Of what transformers keeps for itself and writes as text with each checkpoint: of 100,000 steps, with thirty
# numbers each, that took 17 s and 154 MB. The run's metrics have all.
LOGS_KEPT = 1000
SAID = ("reward", "eval_reward", "kl", "loss", "grad_norm")  # of each row, in the trainer's own log


class HeartbeatCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Keeps the heartbeat true, and stops a trainer that was replaced at its next step."""

    def __init__(self, heartbeat: Heartbeat, checkpoints: CheckpointSaver, leaving: Leaving) -> None:
        self._heartbeat = heartbeat
        self._checkpoints = checkpoints
        self._leaving = leaving

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._checkpoints.begin_from(state.global_step, state.logging_steps)
        self._leaving.begin(self._checkpoints.last_store_s)
        # Rollout nodes are bought once the trainer is `training`. Before its first request for completions the
        # first step may still fail over what run.yaml says.
        activity = "training" if state.global_step else None
        self._heartbeat.say(activity, step=state.global_step, max_steps=state.max_steps)

    def on_step_begin(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self._heartbeat.check()

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._heartbeat.say(step=state.global_step, stored_step=self._checkpoints.stored_step())

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        kl = logs.get("kl")
        if kl is not None and math.isfinite(kl):
            self._heartbeat.say(kl=kl)


class MetricsCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Stores what TRL logs, a row a step. What is logged twice at one step, as evaluation is, shares the row."""

    def __init__(self, store: Store, costs: StepCosts, timeline: int, attempt: int) -> None:
        self._store = store
        self._writer = metrics.MetricsWriter(store)
        self._costs = costs
        self._timeline = timeline
        self._attempt = attempt
        self._step = -1
        self._values: dict[str, float] = {}
        self._unused: dict[str, float] = {}  # for the timeline's first row

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._step = state.global_step
        key = layout.metrics_chunk(self._timeline, self._step)  # of all rows of a long run there is too much
        rows = metrics.read_chunk(self._store, key)
        self._values = next((dict(row.values) for row in rows if row.step == self._step), {})
        if self._timeline and self._begins_timeline():
            windows, tokens = rollouts.unused_windows(self._store, self._timeline - 1)
            self._unused = {metrics.UNUSED_WINDOWS: windows, metrics.UNUSED_TOKENS: tokens}

    def _begins_timeline(self) -> bool:
        """True if the timeline has no row that this trainer goes on from."""
        chunks = self._store.entries(layout.metrics(self._timeline))
        rows = metrics.read_chunk(self._store, chunks[0].key) if chunks else []
        return all(row.step > self._step for row in rows)

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        if state.global_step != self._step:
            self._step, self._values = state.global_step, {}
        self._values.update(self._unused)
        self._unused = {}
        for name, value in self._costs.take().items():
            adds_up = name in ADD_UP
            self._values[name] = round(value + self._values.get(name, 0.0), 6) if adds_up else value
        self._values.update(storable(logs))
        said = {name: self._values[name] for name in SAID if name in logs and name in self._values}
        if said:
            log.info("step", step=self._step, **said)
        self._writer.append(Row(self._timeline, self._step, time.time(), self._attempt, dict(self._values)))


class SamplesCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Has the last samples written before the trainer ends."""

    def __init__(self, samples: SampleWriter) -> None:
        self._samples = samples

    def on_train_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self._samples.finish()


class Diverged(Exception):
    """The guard has tripped: nothing of this step may be saved, and no further one taken."""

    def __init__(self, verdict: Verdict) -> None:
        found = "; ".join(verdict.evidence) or "no evidence was kept"
        super().__init__(f"the run diverges since step {verdict.onset_step}: {found}")


class GuardCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Watches for divergence, after the row is stored: whoever reads that has what the guard has judged by.

    Args:
        heartbeat: told the verdict.
        policy: the run's, what to do about it among others.
        detector: as of the checkpoint that training goes on from.
    """

    def __init__(self, heartbeat: Heartbeat, policy: KlPolicy, detector: Detector) -> None:
        self._heartbeat = heartbeat
        self._policy = policy
        self.detector = detector

    def on_train_begin(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self._heartbeat.say(verdict=self.detector.verdict)

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        point = metrics.point_at(state.global_step, storable(logs))
        try:
            detector = follow(self.detector, point, self._policy.limit, self._policy.task_changes)
        except Exception:  # an error in watching must not end training; the daemon, which judges alike, reports it
            log.exception("guard_failed", step=point.step)
            return
        self._take(detector)

    def policy_is_gone(self, step: int, onset_step: int) -> None:
        """The weights of `step` compute no number, from which no completion comes and so nothing to log.

        Raises Diverged.
        """
        self._take(trip_at(self.detector, step, onset_step, "the policy's log-probabilities are not numbers"))

    def _take(self, detector: Detector) -> None:
        before, self.detector = self.detector.verdict, detector
        verdict = detector.verdict
        self._heartbeat.say(verdict=verdict)
        if verdict.health is not before.health:
            log.warning("verdict", health=verdict.health, onset_step=verdict.onset_step, evidence=verdict.evidence)
        if verdict.health is Health.TRIPPED and self._policy.action != "alert":
            raise Diverged(verdict)


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Sees that the last step is saved, that a save which found no room is tried again, and that what is saved
    does not grow with the run. In every process.

    Args:
        save_is_due: whether one has found no room.
        leave_if_due: raises LeaveNow in the middle of a step where the trainer is to end.
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
    """The numbers of a log that JSON can carry; a marker stands for each that it cannot."""
    values: dict[str, float] = {}
    for name, value in logs.items():
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            values[metrics.NONFINITE + name] = 1.0
        elif isinstance(value, int | float):
            values[name] = float(value)
    return values
