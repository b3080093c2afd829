"""What `report_to` names, over restarts and rollbacks: each timeline one run there, with a note wherever a trainer
began, and no error of theirs an error of the run's.

The first trainer of a run ends where a sink cannot begin, for that is a mistake in run.yaml. Any later one goes on
without: what has trained for hours does not stop because a server elsewhere is down.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from transformers import TrainerCallback

from checkpoint.records.metrics import NONFINITE, Row
from policies.model.timelines import Fork
from policies.model.vocabulary import Precedence
from tasks.trainer.event_files import has_events, write_past
from tasks.trainer.unhurried import Late, Unhurried
from tasks.trainer.user_objects import BadSpec, first_line, passes

log = structlog.get_logger()

FIRST: Precedence = (0, 1, 1)  # of a run's first trainer
FAILURES_MOST = 3  # in a row, before a sink is left out until the trainer starts again: each may be a time-out
NOTES = "grpo-orch"  # the name of what is noted in TensorBoard
TIMELINE_TAG = "grpo_orch.timeline"  # by which MLflow's run of a timeline is found again
# TensorBoard writes into a folder, which may be on a network and hang for as long as that likes. MLflow asks eight
# times and waits two minutes each, and at its end for all that it has not sent: hours, where a server hangs. In a
# thread of its own it may: of a server that comes back it misses nothing. Its own variables for this are left as
# they are: set for a call, they were gone in the middle of what its threads did with them. The others have limits.
UNHURRIED = ("TensorBoard", "MLflow")
BEGIN_S = 60.0  # TensorBoard takes the past steps, too
STEP_S = 10.0
STEP = "train/global_step"  # as TRL's own reports have it
ALWAYS_LOGGED = "reward"
ATTEMPT, TIMELINE = "orch/attempt", "orch/timeline"


@dataclass(frozen=True, slots=True)
class Beginning:
    """How this trainer begins. `fork` is None on timeline 0; `timeline_id` is one timeline's in all runs.

    `past` returns the rows that the store has of the timeline's steps.
    """

    by: Precedence
    node: str
    fork: Fork | None
    timeline_id: str
    past: Callable[[], Sequence[Row]] = tuple

    def words(self, step: int) -> tuple[str, str]:
        """A title and a sentence, for people."""
        timeline, _, attempt = self.by
        changes = ", ".join(f"{key} {value:g}" for key, value in self.fork.changes.items()) if self.fork else ""
        begins = self.fork is not None and step == (self.fork.start_at.step if self.fork.start_at else 0)
        if self.fork is not None and begins:
            start = f"checkpoint {self.fork.start}" if self.fork.start else "the run's start"
            changed = f", with {changes}" if changes else ""
            return f"Timeline {timeline}", f"Rolled back to {start}{changed}: {self.fork.reason}"
        verb = "goes on" if step else "begins"
        return f"Trainer {verb}", f"{self.node} (attempt {attempt}) {verb} from step {step} of timeline {timeline}"


def keep_sinks(sinks: Sequence[Any], beginning: Beginning) -> None:
    """Have transformers' callbacks for reports be one run each over restarts, and harmless."""
    for sink in sinks:
        _Kept(sink, beginning)


class _Kept:
    """One sink: what it is told of passes through here."""

    def __init__(self, sink: Any, beginning: Beginning) -> None:
        self._sink = sink
        self._beginning = beginning
        self._name = type(sink).__name__.removesuffix("Callback")
        self._failures = 0
        self._there: dict[int, Row] = {}  # by step, what the service has of an earlier trainer
        self._unhurried = Unhurried() if self._name in UNHURRIED else None
        for name in [name for name in dir(sink) if name.startswith("on_")]:
            own = getattr(type(sink), name, None)
            if own is getattr(TrainerCallback, name, None):
                continue  # it does nothing there
            passed = self._begin if name == "on_train_begin" else self._told
            setattr(sink, name, functools.partial(passed, name, getattr(sink, name)))

    def _begin(self, _: str, begin: Callable[..., Any], args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """It connects. Raises BadSpec where the run's first trainer cannot."""
        step, now, answer = state.global_step, copy.copy(state), None

        def connect() -> Any:
            try:
                _RESUMES.get(self._name, _as_it_is)(self._sink, self._beginning, step)
                begun = begin(args, now, control, **kwargs)
            except Exception:
                self._failures = FAILURES_MOST  # also where nobody waits any more
                raise
            has = _HAS.get(self._name)
            if has is not None and self._beginning.by != FIRST:
                again = [row for row in self._beginning.past() if row.step >= step]
                self._there = {row.step: row for row in has(self._sink, again)}
            return begun

        try:
            answer = self._do(connect, BEGIN_S)
        except Exception as error:  # each service raises its own
            if self._beginning.by == FIRST:
                if passes(error):
                    raise
                told = f"{self._name}: {type(error).__name__}: {first_line(error)}"
                raise BadSpec(f"grpo.report_to: {told}") from error
            if not isinstance(error, Late):
                self._say("report_left_out", error)
                return None
            self._say("report_failed", error)
        if state.is_world_process_zero and self._beginning.by != FIRST:
            note = _NOTES.get(self._name, _as_it_is)
            self._pass_on(functools.partial(note, self._sink, self._beginning, step))
        return answer

    def _told(
        self, name: str, event: Callable[..., Any], args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Any:
        """Pass on what happened as it is now: by the time that a late sink hears of it, training has gone on."""
        kwargs = {key: copy.copy(value) if key == "logs" else value for key, value in kwargs.items()}
        now = copy.copy(state)

        def call() -> Any:  # once it has begun, and knows what it has
            if name == "on_log" and self._has(now.global_step, kwargs.get("logs", {})):
                return None
            return event(args, now, control, **kwargs)

        return self._pass_on(call, at_last=name == "on_train_end")

    def _has(self, step: int, logs: Mapping[str, Any]) -> bool:
        """Whether the service has that step from before a restart: it would be there twice. What is logged once
        more of it, as an evaluation that was cut off, is passed on."""
        row = self._there.get(step)
        return row is not None and all(name in row.values or NONFINITE + name in row.values for name in logs)

    def _pass_on(self, call: Callable[[], Any], *, at_last: bool = False) -> Any:
        if self._failures >= FAILURES_MOST:
            return None
        try:
            answer = self._do(call, STEP_S, at_last=at_last)
        except Exception as error:  # noqa: BLE001  # each service raises its own
            self._failures += 1
            self._say("report_left_out" if self._failures >= FAILURES_MOST else "report_failed", error)
            return None
        self._failures = 0
        return answer

    def _do(self, call: Callable[[], Any], limit_s: float, *, at_last: bool = False) -> Any:
        return call() if self._unhurried is None else self._unhurried.do(call, limit_s, at_last=at_last)

    def _say(self, what: str, error: Exception) -> None:
        log.warning(what, sink=self._name, error=f"{type(error).__name__}: {first_line(error)}")


def _as_it_is(_sink: Any, _beginning: Beginning, _step: int) -> None:
    """Its own name and id make it one run: W&B, trackio."""


def _resume_tensorboard(sink: Any, beginning: Beginning, step: int) -> None:
    """The steps after this one are made again: TensorBoard is to hide what was written of them before. On a new
    machine, it gets those up to here."""
    folder = Path(sink.logging_dir)
    if step and not has_events(folder):
        rows = [row for row in beginning.past() if row.step <= step]
        if rows:
            write_past(sink._SummaryWriter, rows, folder)
    sink._SummaryWriter = functools.partial(sink._SummaryWriter, purge_step=step + 1)


def _resume_mlflow(_sink: Any, beginning: Beginning, _step: int) -> None:
    """MLflow gives a run its id by itself: it is found again by a tag."""
    if os.environ.get("MLFLOW_RUN_ID"):
        return
    mlflow = importlib.import_module("mlflow")
    tags = {**json.loads(os.environ.get("MLFLOW_TAGS") or "{}"), TIMELINE_TAG: beginning.timeline_id}
    os.environ["MLFLOW_TAGS"] = json.dumps(tags)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
    found = mlflow.search_runs(
        filter_string=f"tags.`{TIMELINE_TAG}` = '{beginning.timeline_id}'",
        max_results=1,
        output_format="list",
        **({"experiment_names": [name]} if name else {"search_all_experiments": True}),
    )
    if found:
        os.environ["MLFLOW_RUN_ID"] = found[0].info.run_id


def _wandb_has(sink: Any, rows: Sequence[Row]) -> Sequence[Row]:
    """Its server says whether it has gone on; offline nobody can."""
    return rows if getattr(sink._wandb.run, "resumed", False) else ()


def _trackio_has(sink: Any, rows: Sequence[Row]) -> Sequence[Row]:
    held = getattr(sink._trackio, "context_vars", None)  # as transformers looks for its Space
    goes_on = held is not None and getattr(held.current_run.get(), "_next_step", None)
    return rows if goes_on else ()


def _mlflow_has(sink: Any, rows: Sequence[Row]) -> Sequence[Row]:
    """What an earlier trainer had still to send when it was killed is not there."""
    run = sink._ml_flow.active_run() if rows else None
    if run is None:  # the first of several processes alone has one
        return ()
    told = sink._ml_flow.MlflowClient().get_metric_history(run.info.run_id, ALWAYS_LOGGED)
    steps = {one.step for one in told}
    return [row for row in rows if row.step in steps]


def _note_tensorboard(sink: Any, beginning: Beginning, step: int) -> None:
    sink.tb_writer.add_text(NOTES, ": ".join(beginning.words(step)), step)
    sink.tb_writer.flush()


def _note_wandb(sink: Any, beginning: Beginning, step: int) -> None:
    title, text = beginning.words(step)
    sink._wandb.log({**_marks(beginning), STEP: step})
    sink._wandb.run.alert(title=title, text=text)


def _note_trackio(sink: Any, beginning: Beginning, step: int) -> None:
    title, text = beginning.words(step)
    sink._trackio.log({**_marks(beginning), STEP: step})
    if (alert := getattr(sink._trackio, "alert", None)) is not None:  # since 0.13
        alert(title=title, text=text)


def _note_mlflow(sink: Any, beginning: Beginning, step: int) -> None:
    timeline, incarnation, attempt = beginning.by
    sink._ml_flow.set_tag(
        f"grpo_orch.trainer.{timeline}-{incarnation}-{attempt}", ": ".join(beginning.words(step))
    )


def _marks(beginning: Beginning) -> dict[str, int]:
    timeline, _, attempt = beginning.by
    return {TIMELINE: timeline, ATTEMPT: attempt}


_RESUMES: dict[str, Callable[[Any, Beginning, int], None]] = {
    "TensorBoard": _resume_tensorboard,
    "MLflow": _resume_mlflow,
}
# Which of the rows the service has; of TensorBoard those that are made again take the place of those before.
_HAS: dict[str, Callable[[Any, Sequence[Row]], Sequence[Row]]] = {
    "Wandb": _wandb_has,
    "Trackio": _trackio_has,
    "MLflow": _mlflow_has,
}
_NOTES: dict[str, Callable[[Any, Beginning, int], None]] = {
    "TensorBoard": _note_tensorboard,
    "Wandb": _note_wandb,
    "Trackio": _note_trackio,
    "MLflow": _note_mlflow,
}
