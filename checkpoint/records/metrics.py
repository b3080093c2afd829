"""What the trainer logs, step by step. Names are TRL's, word for word; ours begin with `orch/`.

A hundred steps share one object that is rewritten at each step, so that reading ten thousand steps is a hundred
reads. One trainer writes a timeline; a restarted one reads the present object and goes on, and a step logged again
replaces the earlier row and keeps its first time. An unreadable row is left out, and dropped when its object is
next written: the run does not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from checkpoint.store import layout
from checkpoint.store.codec import from_json, to_json
from checkpoint.store.document import Unreadable
from checkpoint.store.errors import Corrupt
from checkpoint.store.run_store import Store
from policies.costs.steps import MeasuredStep
from policies.detect.divergence import Point

READERS = 16  # requests at once; a store answers one in tens of milliseconds
# Ours, beside TRL's names.
TOKENS = "orch/tokens"  # completion tokens that this step trained on
TOKENS_DISCARDED = "orch/tokens_discarded"  # tokens generated for this step and lost with their node
REPLAYED = "orch/replayed"  # 1 where the completions came from the store
WAIT_S = "orch/wait_s"  # seconds in which no node could serve
GENERATE_S = "orch/generate_s"  # seconds in which completions to train on were made
GENERATE_NODE_S = "orch/generate_node_s"  # the same, times the machines that made them
# Of GENERATE_S, seconds in which the trainer was at work on earlier steps; absent where none.
AHEAD_S = "orch/ahead_s"
# Seconds in which requests of a training window were open and no node could serve them: the nodes load the policy,
# or the fleet is empty. Unlike WAIT_S it counts also while the trainer works on earlier steps.
UNSERVED_S = "orch/unserved_s"
# Optimizer steps between the policy that sampled the completions and the one that trains on them; the most of the
# row's windows.
STALENESS = "orch/staleness"
# In a timeline's first row: windows that the timeline before had stored and not trained on, and their tokens.
UNUSED_WINDOWS = "orch/unused_windows"
UNUSED_TOKENS = "orch/unused_tokens"
# Of GENERATE_S, seconds in which the trainer made them in place of nodes that were not there; absent where none.
OWN_GENERATE_S = "orch/own_generate_s"
REWARDS_S = "orch/rewards_s"  # seconds in which completions to train on were scored
STORE_S = "orch/store_s"  # seconds in which the trainer stood still for a checkpoint, one before this step's end
# Of the policies published since the row before; absent where none was.
PUBLISHED = "orch/published"  # how many
PUBLISH_S = "orch/publish_s"
ENCODE_S = "orch/encode_s"  # of these seconds, those until all was encoded; sending begins before
PUBLISHED_BYTES = "orch/published_bytes"  # that went to the store
WEIGHTS_BYTES = "orch/weights_bytes"  # that their weights have
REWARD_MIN = "orch/reward_min"
REWARD_MAX = "orch/reward_max"
PROMPTS_REFUSED = "orch/prompts_refused"  # prompts that no node took; absent where all were taken
# Of the last such prompt: its row in the dataset, its length, and how long prompt and completion may be together.
REFUSED_ROW = "orch/refused_row"
REFUSED_TOKENS = "orch/refused_tokens"
REFUSED_LIMIT = "orch/refused_limit_tokens"
# JSON has no NaN: a value that was logged as NaN, infinite or None is left out, and `orch/nonfinite/NAME` is 1.
NONFINITE = "orch/nonfinite/"
OURS = "orch/"
NUMBER_END = 2.0**63
# What is logged once more at a step that has its row: by an evaluation, and at the end of training.
ADDED_LATER = ("eval_", "train_", "total_flos")


@dataclass(frozen=True, slots=True)
class Row:
    """One logged step. Times are the wall clock at the end of the step, seconds since the epoch.

    All readers of a run's log use rows. Only the detectors have a shape of their own, `Point`: they know no store,
    and must tell a value that was not finite from one that was not logged.

    A step made again after a restart has a new `time_s` and keeps its `first_time_s`, so that the cost of the
    restart shows after the last step before it.
    """

    timeline: int
    step: int
    time_s: float
    attempt: int
    values: dict[str, float]
    first_time_s: float | None = None  # None: it was logged once

    @property
    def reached_s(self) -> float:
        """When the run first had this step."""
        return self.time_s if self.first_time_s is None else self.first_time_s

    @property
    def tokens(self) -> int:
        return round(self.values.get(TOKENS, 0.0))

    @property
    def tokens_discarded(self) -> int:
        return round(self.values.get(TOKENS_DISCARDED, 0.0))


def read_metrics(store: Store, timeline: int | None = None) -> list[Row]:
    """Return the rows in (timeline, step) order; a step that was logged twice appears as last logged."""
    prefix = layout.METRICS if timeline is None else layout.metrics(timeline)
    chunks = read_chunks(store, [entry.key for entry in store.entries(prefix)])
    return in_order(row for rows in chunks for row in rows)


def read_chunks(store: Store, keys: Sequence[str], unreadable: Unreadable | None = None) -> list[list[Row]]:
    """`read_chunk` of each, READERS at a time: of 100,000 steps there are a thousand."""
    if len(keys) < 2:
        return [read_chunk(store, key, unreadable) for key in keys]
    with ThreadPoolExecutor(READERS, thread_name_prefix="metrics") as pool:
        return list(pool.map(lambda key: read_chunk(store, key, unreadable), keys))


def logged(rows: Iterable[Row], name: str) -> list[float]:
    """Return a metric's values in the order of the rows, without the rows that have none."""
    return [row.values[name] for row in rows if name in row.values]


def point_of(row: Row) -> Point:
    """Return what the detector of divergence is told of a row: what the trainer's own guard was told."""
    return point_at(row.step, row.values)


def point_at(step: int, values: Mapping[str, float]) -> Point:
    """Return what the detector of divergence is told of a log that becomes a row.

    Only what training itself logged: an evaluation at that step is added to the row after the guard has judged it,
    and whoever reads the row later must come to the same verdict.
    """
    logged: dict[str, float | None] = {name: value for name, value in values.items() if _is_trainings(name)}
    lost = (name.removeprefix(NONFINITE) for name in values if name.startswith(NONFINITE))
    logged.update({name: math.nan for name in lost if _is_trainings(name)})
    return Point(step, logged)


def _is_trainings(name: str) -> bool:
    return not name.startswith((OURS, *ADDED_LATER))


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Return the rows in (timeline, step) order, of each step the last."""
    return sorted({(row.timeline, row.step): row for row in rows}.values(), key=lambda r: (r.timeline, r.step))


def read_chunk(store: Store, key: str, unreadable: Unreadable | None = None) -> list[Row]:
    """Return the rows of one metrics object, none where there is no such object. Raises StoreError.

    What is no row of that object is left out, and noted in `unreadable`.
    """
    data = store.get_or_none(key)
    return [] if data is None else rows_of(data, key, unreadable)


def rows_of(data: bytes, key: str, unreadable: Unreadable | None = None) -> list[Row]:
    """Decode a metrics object; see `read_chunk`."""
    rows = []
    for line in data.splitlines():
        try:
            row = from_json(line, Row, key, _check)
        except Corrupt as error:
            if unreadable is not None:
                unreadable.note(key, error)
        else:
            rows.append(row)
    return rows


def _check(row: Row, key: str) -> None:
    """Raise ValueError for what is no row of that object, and for times and counts that sums and calendars of all
    views would overflow with."""
    if layout.metrics_chunk(row.timeline, row.step) != key:
        raise ValueError(f"a row of timeline {row.timeline}, step {row.step}, which belongs elsewhere")
    scores = (REWARD_MIN, REWARD_MAX)  # the user's, as large as they like: no view sums them
    ours = [value for name, value in row.values.items() if name.startswith(OURS) and name not in scores]
    if not all(abs(value) < NUMBER_END for value in (row.time_s, row.reached_s, *ours)):
        raise ValueError(f"a row of step {row.step} with a time or a count of more than 64 bits")


def unused_before(rows: Iterable[Row], timeline: int) -> tuple[int, int]:
    """Return the windows that the timeline before this one had stored and not trained on, and their tokens."""
    first = next((row for row in rows if row.timeline == timeline and UNUSED_WINDOWS in row.values), None)
    if first is None:
        return 0, 0
    return round(first.values[UNUSED_WINDOWS]), round(first.values.get(UNUSED_TOKENS, 0.0))


class MetricsWriter:
    """Adds rows to a timeline's objects. The timeline's only writer, so it need not read again what it wrote."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._key = ""
        self._rows: dict[int, Row] = {}

    def append(self, row: Row) -> None:
        """Add a row; one of a step that was logged before keeps its first time. Raises StoreError."""
        key = layout.metrics_chunk(row.timeline, row.step)
        if key != self._key:
            self._key, self._rows = key, {old.step: old for old in read_chunk(self._store, key)}
        first = self._rows.get(row.step)
        self._rows[row.step] = row if first is None else replace(row, first_time_s=first.reached_s)
        self._store.put(key, b"".join(to_json(self._rows[step]) + b"\n" for step in sorted(self._rows)))


# Where the time of the logged steps went.

# What rows tell, in the order of a step; what is left of it is training and whatever is not told.
TOLD = {
    "waiting for nodes": WAIT_S,
    "generating": GENERATE_S,
    "rewards": REWARDS_S,
    "publishing weights": PUBLISH_S,
    "storing": STORE_S,
}
GENERATING = "generating"
TRAINING, STARTED_AGAIN = "training", "started again"
PARTS = (*TOLD, TRAINING, STARTED_AGAIN)


@dataclass(frozen=True, slots=True)
class StepSplit:
    """The time until one row since the row before it. `seconds` has every one of PARTS."""

    row: Row
    steps: int  # that the row is of
    seconds: dict[str, float]


def split(rows: Sequence[Row]) -> list[StepSplit]:
    """Return where the time between each two of `rows`, in the order of time, went.

    Between two lives of a trainer it is all put down to the new start, with the steps that were made again. Parts
    are never more than the whole: where they overlap, as publishing does with training, the later in PARTS is cut.
    """
    found = []
    for before, row in pairwise(rows):
        left_s = max(0.0, row.time_s - before.time_s)
        seconds = dict.fromkeys(PARTS, 0.0)
        if (row.timeline, row.attempt) != (before.timeline, before.attempt):
            seconds[STARTED_AGAIN] = left_s
        else:
            for part, name in TOLD.items():
                part_s = row.values.get(name, 0.0)
                if part == GENERATING:  # not what the trainer's work hides
                    part_s -= row.values.get(AHEAD_S, 0.0)
                seconds[part] = min(left_s, max(0.0, part_s))
                left_s -= seconds[part]
            seconds[TRAINING] = left_s
        found.append(StepSplit(row, max(1, row.step - before.step), seconds))
    return found


# How long the logged steps took, and what trainer and rollout nodes did meanwhile.


@dataclass(frozen=True, slots=True)
class StepTiming:
    """What trainer and rollout nodes did in a step: seconds, the mean of the steps that share a generation window.

    Attributes:
        step_s: from the end of the step before to its own end.
        generate_s: nodes generated the completions that it trains on, whether the trainer waited or not.
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
    def in_turns_s(self) -> float:
        """A step in which the trainer and the nodes wait for each other."""
        return self.generate_s + self.train_s + self.sync_s

    @property
    def overlapped_s(self) -> float:
        """A step in which nodes generate while the trainer works."""
        return max(self.generate_s, self.train_s) + self.sync_s


def step_timings(rows: Sequence[Row]) -> list[tuple[Row, StepTiming]]:
    """Return the timing of the steps among `rows`, by the row in which their generation window was logged.

    `rows` are in the order of time. The steps of the newest window are left out, as in `step_times`.
    """
    return [(window.first, _timing(window)) for window in _windows(rows)]


def median_timing(timings: Iterable[StepTiming]) -> StepTiming | None:
    """Return the medians of each of their numbers; None of none."""
    timings = list(timings)
    if not timings:
        return None
    known = [timing.staleness for timing in timings if timing.staleness is not None]
    return StepTiming(
        step_s=median(timing.step_s for timing in timings),
        generate_s=median(timing.generate_s for timing in timings),
        train_s=median(timing.train_s for timing in timings),
        sync_s=median(timing.sync_s for timing in timings),
        trainer_idle_s=median(timing.trainer_idle_s for timing in timings),
        fleet_idle_s=median(timing.fleet_idle_s for timing in timings),
        staleness=median(known) if known else None,
    )


def step_times(rows: Sequence[Row]) -> list[MeasuredStep]:
    """Return the steps among `rows`, in the order of time, that one life of a trainer has made.

    A generation may serve several steps: those until the next one make one entry, and share it evenly. The newest
    are left out until the next generation is logged.
    """
    return [_step(window) for window in _windows(rows)]


@dataclass(frozen=True, slots=True)
class _Window:
    """The rows whose steps share a generation, which `first` has; how many steps, and how long they took."""

    first: Row
    rows: tuple[Row, ...]
    steps: int
    took_s: float

    def sum(self, name: str) -> float:
        return sum(max(0.0, row.values.get(name, 0.0)) for row in self.rows)


def _windows(rows: Sequence[Row]) -> list[_Window]:
    """Return the windows that one life of a trainer has made, without the newest."""
    found: list[_Window] = []
    window: _Window | None = None
    for before, row in pairwise(rows):
        same_life = (row.timeline, row.attempt) == (before.timeline, before.attempt)
        goes_on = same_life and row.step > before.step and not row.values.get(REPLAYED)
        if window is not None and (not goes_on or _generates(row)):
            found.append(window)
            window = None
        if not goes_on:
            continue
        if _generates(row):
            window = _Window(row, (), 0, 0.0)
        if window is not None:
            took_s = max(0.0, row.time_s - before.time_s)
            window = _Window(
                window.first, (*window.rows, row), window.steps + row.step - before.step, window.took_s + took_s
            )
    return found


def _generates(row: Row) -> bool:
    made_by = row.values.get(GENERATE_NODE_S, 0.0) + row.values.get(OWN_GENERATE_S, 0.0)
    return row.values.get(GENERATE_S, 0.0) > 0 and made_by > 0


def _step(window: _Window) -> MeasuredStep:
    values, steps, took_s = window.first.values, window.steps, window.took_s
    generated_s = values[GENERATE_S]
    nodes = values.get(GENERATE_NODE_S, 0.0) / generated_s
    own_s = values.get(OWN_GENERATE_S, 0.0)
    if own_s:  # a drought's first step waits for nodes before it begins, and no other does
        took_s = max(generated_s, took_s - values.get(WAIT_S, 0.0))
    # Within a step, training hides a part of the generation and never all of it: it waits for its first window.
    ahead_s = min(generated_s, values.get(AHEAD_S, 0.0)) if values.get(STALENESS) else 0.0
    return MeasuredStep(
        took_s / steps, generated_s / steps, nodes, window.first.tokens / steps, own_s / steps, ahead_s / steps
    )


def _timing(window: _Window) -> StepTiming:
    took_s, steps = window.took_s, window.steps
    generate_s, own_s = window.sum(GENERATE_S), window.sum(OWN_GENERATE_S)
    wait_s, publish_s = min(took_s, window.sum(WAIT_S)), window.sum(PUBLISH_S)
    ahead_s = min(generate_s, window.sum(AHEAD_S))
    idle_s = min(took_s, wait_s + max(0.0, generate_s - own_s - ahead_s))
    unserved_s = window.sum(UNSERVED_S)
    # While the trainer works, GENERATE_S counts from the request, the time before a node serves it included.
    hidden_s = max(0.0, unserved_s - wait_s)
    has_nodes = window.sum(GENERATE_NODE_S) > 0
    return StepTiming(
        step_s=took_s / steps,
        generate_s=max(0.0, generate_s - hidden_s) / steps,
        train_s=max(0.0, took_s - idle_s - own_s - publish_s) / steps,
        sync_s=(publish_s + unserved_s) / steps,
        trainer_idle_s=idle_s / steps,
        fleet_idle_s=max(0.0, took_s - generate_s - wait_s) / steps if has_nodes else 0.0,
        staleness=window.first.values.get(STALENESS),
    )
