"""The trainer's log, step by step. Metrics have TRL's names; ours begin with `orch/`.

A hundred steps share one object that the trainer rewrites at each step, so reading ten thousand steps takes a
hundred reads. Each timeline has one trainer as its writer; after a restart it reads the current object and
continues. A step logged again replaces the earlier row and keeps its first time. Unreadable rows are skipped, and
dropped at the next write: the run does not depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import from_json, to_json
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.checkpoint.store.errors import Corrupt
from grpo_orch.checkpoint.store.run_store import Store, in_parallel
from grpo_orch.policies.costs.steps import MeasuredStep
from grpo_orch.policies.detect.divergence import Point

# Our metrics. `_S`: seconds.
TOKENS = "orch/tokens"  # completion tokens that this step trained on
TOKENS_DISCARDED = "orch/tokens_discarded"  # tokens generated for this step and lost with their node
REPLAYED = "orch/replayed"  # 1 if the completions came from the store
WAIT_S = "orch/wait_s"  # no node could serve
GENERATE_S = "orch/generate_s"  # completions to train on were generated
GENERATE_NODE_S = "orch/generate_node_s"  # the same, times the number of generating machines
# Part of GENERATE_S during which the trainer worked on earlier steps; absent if 0.
AHEAD_S = "orch/ahead_s"
# Requests of a training window were open and no node could serve them: the nodes load the policy, or the fleet is
# empty. Unlike WAIT_S this includes time in which the trainer works on earlier steps.
UNSERVED_S = "orch/unserved_s"
# Optimizer steps between the policy that sampled the completions and the one that trains on them; the maximum over
# the row's windows.
STALENESS = "orch/staleness"
# In a timeline's first row: windows that the previous timeline had stored and not trained on, and their tokens.
UNUSED_WINDOWS = "orch/unused_windows"
UNUSED_TOKENS = "orch/unused_tokens"
# Part of GENERATE_S during which the trainer generated because nodes were missing; absent if 0.
REWARDS_S = "orch/rewards_s"  # completions to train on were scored
STORE_S = "orch/store_s"  # the trainer paused for a checkpoint, which precedes this step's end
# The policies published since the previous row; absent if none was.
PUBLISHED = "orch/published"  # their number
PUBLISH_S = "orch/publish_s"
ENCODE_S = "orch/encode_s"  # part of PUBLISH_S until encoding was complete; uploads begin earlier
PUBLISHED_BYTES = "orch/published_bytes"  # uploaded
WEIGHTS_BYTES = "orch/weights_bytes"  # size of the full weights
REWARD_MIN = "orch/reward_min"
REWARD_MAX = "orch/reward_max"
PROMPTS_REFUSED = "orch/prompts_refused"  # prompts that every node refused; absent if 0
# The last refused prompt: its row in the dataset, its length, and the limit of prompt and completion together.
REFUSED_ROW = "orch/refused_row"
REFUSED_TOKENS = "orch/refused_tokens"
REFUSED_LIMIT = "orch/refused_limit_tokens"
# JSON has no NaN: a value logged as NaN, infinite or None is omitted, and `orch/nonfinite/NAME` is 1.
NONFINITE = "orch/nonfinite/"
OURS = "orch/"
NUMBER_END = 2.0**63
# Metrics added to an existing row: by an evaluation, and at the end of training.
ADDED_LATER = ("eval_", "train_", "total_flos")


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """One logged step. Times are the wall clock at the end of the step, seconds since the epoch.

    All readers of a run's log use rows, except the detectors: their `Point` distinguishes a value that was not
    finite from one that was not logged.

    A step repeated after a restart has a new `time_s` and keeps its `first_time_s`, so that the cost of the
    restart shows after the last step before it.
    """

    timeline: int
    step: int
    time_s: float
    attempt: int
    values: dict[str, float]
    first_time_s: float | None = None  # None: logged once

    @property
    def reached_s(self) -> float:
        """Return when the run first reached this step."""
        return self.time_s if self.first_time_s is None else self.first_time_s

    @property
    def tokens(self) -> int:
        return round(self.values.get(TOKENS, 0.0))

    @property
    def tokens_discarded(self) -> int:
        return round(self.values.get(TOKENS_DISCARDED, 0.0))


def read_metrics(store: Store, timeline: int | None = None) -> list[MetricsRow]:
    """Return the rows in (timeline, step) order; of a step logged twice, the last one."""
    prefix = layout.METRICS if timeline is None else layout.metrics(timeline)
    chunks = read_chunks(store, [entry.key for entry in store.entries(prefix)])
    return in_order(row for rows in chunks for row in rows)


def read_chunks(
    store: Store, keys: Sequence[str], unreadable: UnreadableDocuments | None = None
) -> list[list[MetricsRow]]:
    """Call `read_chunk` for each key, in parallel: 100,000 steps have a thousand chunks."""
    return in_parallel(lambda key: read_chunk(store, key, unreadable), keys)


def logged(rows: Iterable[MetricsRow], name: str) -> list[float]:
    """Return a metric's values in the order of the rows that have it."""
    return [row.values[name] for row in rows if name in row.values]


def point_of(row: MetricsRow) -> Point:
    """Return the divergence detector's input for a row, equal to that of the trainer."""
    return point_at(row.step, row.values)


def point_at(step: int, values: Mapping[str, float]) -> Point:
    """Return the divergence detector's input for the values of a step.

    It contains only what training itself logged. An evaluation is added to the row after the guard's verdict, and
    later readers of the row must reach the same verdict.
    """
    logged: dict[str, float | None] = {name: value for name, value in values.items() if _is_from_training(name)}
    nonfinite = (name.removeprefix(NONFINITE) for name in values if name.startswith(NONFINITE))
    logged.update({name: math.nan for name in nonfinite if _is_from_training(name)})
    return Point(step, logged)


def _is_from_training(name: str) -> bool:
    return not name.startswith((OURS, *ADDED_LATER))


def in_order(rows: Iterable[MetricsRow]) -> list[MetricsRow]:
    """Return the rows in (timeline, step) order; of a step logged twice, the last one."""
    by_step = {(row.timeline, row.step): row for row in rows}
    return [by_step[key] for key in sorted(by_step)]


def read_chunk(store: Store, key: str, unreadable: UnreadableDocuments | None = None) -> list[MetricsRow]:
    """Return the rows of one metrics object, or [] if it does not exist. Raises StoreError.

    Invalid rows are skipped and noted in `unreadable`.
    """
    rows = []
    for line in (store.get_or_none(key) or b"").splitlines():
        try:
            row = from_json(line, MetricsRow, key, _check)
        except Corrupt as error:
            if unreadable is not None:
                unreadable.note(key, error)
        else:
            rows.append(row)
    return rows


def _check(row: MetricsRow, key: str) -> None:
    """Raise ValueError for a row of another object, and for times and counts that would overflow in views."""
    if layout.metrics_chunk(row.timeline, row.step) != key:
        raise ValueError(f"timeline {row.timeline}, step {row.step} belongs in another object")
    scores = (REWARD_MIN, REWARD_MAX)  # the user's functions set them; no view sums them
    ours = [value for name, value in row.values.items() if name.startswith(OURS) and name not in scores]
    if not all(abs(value) < NUMBER_END for value in (row.time_s, row.reached_s, *ours)):
        raise ValueError(f"step {row.step} has a time or a count of more than 64 bits")


def unused_before(rows: Iterable[MetricsRow], timeline: int) -> tuple[int, int]:
    """Return how many windows the previous timeline had stored and not trained on, and their tokens."""
    first = next((row for row in rows if row.timeline == timeline and UNUSED_WINDOWS in row.values), None)
    if first is None:
        return 0, 0
    return round(first.values[UNUSED_WINDOWS]), round(first.values.get(UNUSED_TOKENS, 0.0))


class MetricsWriter:
    """Adds rows to a timeline's objects. It must be the only writer, since it caches the rows that it wrote."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._key = ""
        self._rows: dict[int, MetricsRow] = {}

    def append(self, row: MetricsRow) -> None:
        """Add a row; a step logged before keeps its first time. Raises StoreError."""
        key = layout.metrics_chunk(row.timeline, row.step)
        if key != self._key:
            self._key, self._rows = key, {old.step: old for old in read_chunk(self._store, key)}
        first = self._rows.get(row.step)
        self._rows[row.step] = row if first is None else replace(row, first_time_s=first.reached_s)
        self._store.put(key, b"".join(to_json(self._rows[step]) + b"\n" for step in sorted(self._rows)))


# Parts of the logged steps' time.

# The measured parts, in the order of a step. The remaining time is training and everything unmeasured.
MEASURED = {
    "waiting for nodes": WAIT_S,
    "generating": GENERATE_S,
    "rewards": REWARDS_S,
    "publishing weights": PUBLISH_S,
    "storing": STORE_S,
}
GENERATING = "generating"
TRAINING, RESTARTING = "training", "restarting"
PARTS = (*MEASURED, TRAINING, RESTARTING)


@dataclass(frozen=True, slots=True)
class StepSplit:
    """The time between a row and the previous one. `seconds` has all PARTS."""

    row: MetricsRow
    steps: int  # that the row covers
    seconds: dict[str, float]


def split(rows: Sequence[MetricsRow]) -> list[StepSplit]:
    """Split the time between consecutive `rows`, which are in the order of time, into PARTS.

    Across a restart of the trainer all time counts as the restart, including repeated steps. The parts add up to
    the whole: where they overlap, as publishing and training do, the later in PARTS is cut.
    """
    found = []
    for before, row in pairwise(rows):
        left_s = max(0.0, row.time_s - before.time_s)
        seconds = dict.fromkeys(PARTS, 0.0)
        if (row.timeline, row.attempt) != (before.timeline, before.attempt):
            seconds[RESTARTING] = left_s
        else:
            for part, name in MEASURED.items():
                part_s = row.values.get(name, 0.0)
                if part == GENERATING:  # except what overlaps with the trainer's work
                    part_s -= row.values.get(AHEAD_S, 0.0)
                seconds[part] = min(left_s, max(0.0, part_s))
                left_s -= seconds[part]
            seconds[TRAINING] = left_s
        found.append(StepSplit(row, max(1, row.step - before.step), seconds))
    return found


# Durations of the logged steps and of the work of trainer and rollout nodes in them.


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The work of trainer and rollout nodes in a step: the mean, in seconds, of the steps of a generation window.

    Attributes:
        step_s: from the end of the previous step to its own end.
        generate_s: nodes generated the step's completions, whether the trainer waited or not.
        train_s: the trainer worked: rewards, gradients, pauses for checkpoints, evaluations.
        sync_s: the policy was published and then loaded, until the first node could serve it.
        trainer_idle_s: the trainer waited for completions or for nodes.
        fleet_idle_s: no request of a training window was open; 0 where the trainer generates itself.
        staleness: optimizer steps between the policy that sampled and the one that was trained; None: not logged.
    """

    step_s: float
    generate_s: float
    train_s: float
    sync_s: float
    trainer_idle_s: float
    fleet_idle_s: float
    staleness: float | None = None

    @property
    def sequential_s(self) -> float:
        """Return the duration of a step in which trainer and nodes work in turns."""
        return self.generate_s + self.train_s + self.sync_s

    @property
    def overlapped_s(self) -> float:
        """Return the duration of a step in which nodes generate while the trainer works."""
        return max(self.generate_s, self.train_s) + self.sync_s


def step_timings(rows: Sequence[MetricsRow]) -> list[tuple[MetricsRow, StepTiming]]:
    """Return the timing of the generation windows in `rows`, each with the row that logged its generation.

    `rows` are in the order of time. The newest window is left out, as in `step_times`.
    """
    return [(window.first, _timing(window)) for window in _windows(rows)]


def median_timing(timings: Iterable[StepTiming]) -> StepTiming | None:
    """Return the median of each field; None without timings."""
    columns = list(zip(*map(astuple, timings), strict=True))
    known = ([value for value in column if value is not None] for column in columns)
    medians: list[Any] = [median(values) if values else None for values in known]
    return StepTiming(*medians) if medians else None


def step_times(rows: Sequence[MetricsRow]) -> list[MeasuredStep]:
    """Return the measured steps in `rows`, which are in the order of time, without steps across a restart.

    A generation may serve several steps: the steps until the next generation make one entry and share its time
    evenly. The newest ones are left out until the next generation is logged.
    """
    return [_step(window) for window in _windows(rows)]


@dataclass(frozen=True, slots=True)
class _Window:
    """The rows whose steps share the generation logged in `first`, the number of steps and their duration."""

    first: MetricsRow
    rows: tuple[MetricsRow, ...]
    steps: int
    took_s: float

    def sum(self, name: str) -> float:
        return sum(max(0.0, row.values.get(name, 0.0)) for row in self.rows)


def _windows(rows: Sequence[MetricsRow]) -> list[_Window]:
    """Return the windows without a restart of the trainer in them, except the newest."""
    found: list[_Window] = []
    window: _Window | None = None
    for before, row in pairwise(rows):
        same_attempt = (row.timeline, row.attempt) == (before.timeline, before.attempt)
        is_next = same_attempt and row.step > before.step and not row.values.get(REPLAYED)
        if window is not None and (not is_next or _has_generation(row)):
            found.append(window)
            window = None
        if not is_next:
            continue
        if _has_generation(row):
            window = _Window(row, (), 0, 0.0)
        if window is not None:
            took_s = max(0.0, row.time_s - before.time_s)
            window = _Window(
                window.first, (*window.rows, row), window.steps + row.step - before.step, window.took_s + took_s
            )
    return found


def _has_generation(row: MetricsRow) -> bool:
    return row.values.get(GENERATE_S, 0.0) > 0 and row.values.get(GENERATE_NODE_S, 0.0) > 0


def _step(window: _Window) -> MeasuredStep:
    values, steps, took_s = window.first.values, window.steps, window.took_s
    generated_s = values[GENERATE_S]
    nodes = values[GENERATE_NODE_S] / generated_s
    # Within a step, training overlaps with part of the generation, never with all: it waits for its first window.
    ahead_s = min(generated_s, values.get(AHEAD_S, 0.0)) if values.get(STALENESS) else 0.0
    return MeasuredStep(took_s / steps, generated_s / steps, nodes, window.first.tokens / steps, ahead_s / steps)


def _timing(window: _Window) -> StepTiming:
    took_s, steps = window.took_s, window.steps
    generate_s = window.sum(GENERATE_S)
    wait_s, publish_s = min(took_s, window.sum(WAIT_S)), window.sum(PUBLISH_S)
    ahead_s = min(generate_s, window.sum(AHEAD_S))
    idle_s = min(took_s, wait_s + max(0.0, generate_s - ahead_s))
    unserved_s = window.sum(UNSERVED_S)
    # While the trainer works, GENERATE_S includes the time from the request until a node serves it.
    hidden_s = max(0.0, unserved_s - wait_s)
    return StepTiming(
        step_s=took_s / steps,
        generate_s=max(0.0, generate_s - hidden_s) / steps,
        train_s=max(0.0, took_s - idle_s - publish_s) / steps,
        sync_s=(publish_s + unserved_s) / steps,
        trainer_idle_s=idle_s / steps,
        fleet_idle_s=max(0.0, took_s - generate_s - wait_s) / steps,
        staleness=window.first.values.get(STALENESS),
    )
