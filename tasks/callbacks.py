"""What the trainer tells the run store while it trains: heartbeat, metrics, resume state, checkpoints.

One small callback each, in the signature of `transformers.TrainerCallback`. Only the main process has them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from pathlib import Path
from typing import Any

import structlog
from transformers import TrainerCallback

from checkpoint import metrics, resume_state
from checkpoint.metrics import Row
from checkpoint.resume_state import ResumeState
from checkpoint.store import Store
from policies.vocabulary import PolicyVersion
from tasks.checkpoints import upload_checkpoint
from tasks.heartbeat import Heartbeat
from tasks.step_costs import StepCosts

log = structlog.get_logger()

SAID = ("reward", "eval_reward", "kl", "loss", "grad_norm")  # of each row, in the trainer's own log


class HeartbeatCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Keeps the heartbeat true, and stops a trainer that was replaced at its next step."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._heartbeat.say("training", step=state.global_step, max_steps=state.max_steps)

    def on_step_begin(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self._heartbeat.check()

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._heartbeat.say(step=state.global_step)

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        kl = logs.get("kl")
        if kl is not None and math.isfinite(kl):
            self._heartbeat.say(kl=kl)


class MetricsCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Stores what TRL logs, a row a step. What is logged twice at one step, as evaluation is, shares the row."""

    def __init__(self, store: Store, costs: StepCosts, timeline: int, attempt: int) -> None:
        self._store = store
        self._costs = costs
        self._timeline = timeline
        self._attempt = attempt
        self._step = -1
        self._values: dict[str, float] = {}

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._step = state.global_step
        rows = metrics.read_metrics(self._store, self._timeline)
        self._values = next((dict(row.values) for row in rows if row.step == self._step), {})

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        if state.global_step != self._step:
            self._step, self._values = state.global_step, {}
        for name, value in self._costs.take().items():
            adds_up = name in (metrics.TOKENS, metrics.TOKENS_DISCARDED, metrics.WAIT_S)
            self._values[name] = round(value + self._values.get(name, 0.0), 3) if adds_up else value
        self._values.update(storable(logs))
        said = {name: self._values[name] for name in SAID if name in logs and name in self._values}
        if said:
            log.info("step", step=self._step, **said)
        metrics.append_metrics(
            self._store, Row(self._timeline, self._step, time.time(), self._attempt, dict(self._values))
        )


class ResumeStateCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Stores the light resume state every so many steps, and takes it up again after a restart."""

    def __init__(self, store: Store, timeline: int, every_steps: int) -> None:
        self._store = store
        self._timeline = timeline
        self._every_steps = every_steps
        self._stored_step = 0
        self._kl: deque[float | None] = deque(maxlen=resume_state.KL_KEPT)
        self._best: tuple[float, int] | None = None

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        at = PolicyVersion(self._timeline, state.global_step)
        kept = resume_state.newest_resume_state(self._store, at)
        self._stored_step = 0 if kept is None else PolicyVersion.parse(kept.policy).step
        if kept is not None:
            self._kl.extend(kept.kl)
            if kept.best_reward is not None and kept.best_step is not None:
                self._best = (kept.best_reward, kept.best_step)
        # What was logged between that state and the checkpoint is in the metrics.
        for row in metrics.read_metrics(self._store, self._timeline):
            if self._stored_step < row.step <= state.global_step:
                self._take(row.values, row.step)

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        self._take(storable(logs), state.global_step)
        if state.global_step // self._every_steps > self._stored_step // self._every_steps:
            self._stored_step = state.global_step
            best_reward, best_step = self._best or (None, None)
            resume_state.write_resume_state(
                self._store,
                ResumeState(
                    resume_state.SCHEMA,
                    str(PolicyVersion(self._timeline, state.global_step)),
                    time.time(),
                    list(self._kl),
                    best_reward,
                    best_step,
                ),
            )

    def _take(self, values: dict[str, float], step: int) -> None:
        if "kl" in values:
            self._kl.append(values["kl"])
        elif metrics.NONFINITE + "kl" in values:
            self._kl.append(None)
        reward = values.get("reward")
        if reward is not None and (self._best is None or reward > self._best[0]):
            self._best = (reward, step)


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Uploads each checkpoint that the trainer saves, and sees that the last step is saved."""

    def __init__(self, store: Store, heartbeat: Heartbeat, timeline: int, meta: dict[str, str]) -> None:
        self._store = store
        self._heartbeat = heartbeat
        self._timeline = timeline
        self._meta = meta

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_save = True

    def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._heartbeat.check()
        self._heartbeat.say("saving")
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        upload_checkpoint(self._store, folder, PolicyVersion(self._timeline, state.global_step), self._meta)
        self._heartbeat.say("training")


def storable(logs: dict[str, Any]) -> dict[str, float]:
    """The numbers of a log that JSON can carry; a marker stands for each that it cannot."""
    values: dict[str, float] = {}
    for name, value in logs.items():
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            values[metrics.NONFINITE + name] = 1.0
        elif isinstance(value, int | float):
            values[name] = float(value)
    return values
