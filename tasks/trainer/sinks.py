"""What `report_to` names, over restarts and rollbacks: each timeline one run there, with a note wherever a trainer
began, and no error of theirs an error of the run's.

The first trainer of a run ends where a sink cannot begin, for that is a mistake in run.yaml. Any later one goes on
without: what has trained for hours does not stop because a server elsewhere is down.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from policies.model.timelines import Fork
from policies.model.vocabulary import Precedence
from tasks.trainer.user_objects import BadSpec, first_line, passes

log = structlog.get_logger()

FIRST: Precedence = (0, 1, 1)  # of a run's first trainer
FAILURES_MOST = 3  # in a row, before a sink is left out until the trainer starts again: each may be a time-out
NOTES = "grpo-orch"  # the name of what is noted in TensorBoard
TIMELINE_TAG = "grpo_orch.timeline"  # by which MLflow's run of a timeline is found again
# MLflow asks eight times and waits two minutes each: twenty minutes in which nobody trains, where a server hangs.
# What it sends of each step it sends beside the training, and asks for as long as it likes.
MLFLOW_WAITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
STEP = "train/global_step"  # as TRL's own reports have it
ATTEMPT, TIMELINE = "orch/attempt", "orch/timeline"


@dataclass(frozen=True, slots=True)
class Beginning:
    """How this trainer begins. `fork` is None on timeline 0; `timeline_id` is one timeline's in all runs."""

    by: Precedence
    node: str
    fork: Fork | None
    timeline_id: str

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
        for name in [name for name in dir(sink) if name.startswith("on_")]:
            passed = self._begin if name == "on_train_begin" else self._pass_on
            setattr(sink, name, functools.partial(passed, getattr(sink, name)))

    def _begin(self, begin: Callable[..., Any], args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """It connects. Raises BadSpec where the run's first trainer cannot."""
        step = state.global_step
        try:
            with _not_for_long():
                _RESUMES.get(self._name, _as_it_is)(self._sink, self._beginning, step)
                answer = begin(args, state, control, **kwargs)
        except Exception as error:  # each service raises its own
            if self._beginning.by == FIRST:
                if passes(error):
                    raise
                raise BadSpec(f"grpo.report_to: {type(error).__name__}: {first_line(error)}") from error
            self._failures = FAILURES_MOST
            self._say("report_left_out", error)
            return None
        if state.is_world_process_zero and self._beginning.by != FIRST:
            self._pass_on(_NOTES.get(self._name, _as_it_is), self._sink, self._beginning, step)
        return answer

    def _pass_on(self, event: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._failures >= FAILURES_MOST:
            return None
        try:
            with _not_for_long():
                answer = event(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # each service raises its own
            self._failures += 1
            self._say("report_left_out" if self._failures >= FAILURES_MOST else "report_failed", error)
            return None
        self._failures = 0
        return answer

    def _say(self, what: str, error: Exception) -> None:
        log.warning(what, sink=self._name, error=f"{type(error).__name__}: {first_line(error)}")


@contextlib.contextmanager
def _not_for_long() -> Iterator[None]:
    """Within, MLFLOW_WAITS holds, where `trainer.env` says nothing else."""
    ours = MLFLOW_WAITS.keys() - os.environ.keys()
    os.environ.update({name: MLFLOW_WAITS[name] for name in ours})
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _as_it_is(_sink: Any, _beginning: Beginning, _step: int) -> None:
    """Its own name and id make it one run: W&B, trackio."""


def _resume_tensorboard(sink: Any, _: Beginning, step: int) -> None:
    """The steps after this one are made again: TensorBoard is to hide what was written of them before."""
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
_NOTES: dict[str, Callable[[Any, Beginning, int], None]] = {
    "TensorBoard": _note_tensorboard,
    "Wandb": _note_wandb,
    "Trackio": _note_trackio,
    "MLflow": _note_mlflow,
}
