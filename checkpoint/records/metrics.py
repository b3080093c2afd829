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

from checkpoint.store import layout
from checkpoint.store.codec import from_json, to_json
from checkpoint.store.document import Unreadable
from checkpoint.store.errors import Corrupt
from checkpoint.store.run_store import Store
from policies.detect.divergence import Point
from policies.fleet.steps import MeasuredStep

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


# How long the logged steps took, and how much of that completions were made in.


def step_times(rows: Sequence[Row]) -> list[MeasuredStep]:
    """Return the steps among `rows`, in the order of time, that one life of a trainer has made.

    A generation may serve several steps: those until the next one make one entry, and share it evenly. The newest
    are left out until the next generation is logged.
    """
    found: list[MeasuredStep] = []
    took_s = steps = 0.0
    begun: Row | None = None  # the row whose generation the present steps share
    for before, row in pairwise(rows):
        same_life = (row.timeline, row.attempt) == (before.timeline, before.attempt)
        goes_on = same_life and row.step > before.step and not row.values.get(REPLAYED)
        if begun is not None and steps and (not goes_on or _generates(row)):
            found.append(_step(begun, took_s, steps))
        if not goes_on:
            begun, steps = None, 0.0
            continue
        if _generates(row):
            begun, took_s, steps = row, 0.0, 0.0
        took_s += max(0.0, row.time_s - before.time_s)
        steps += row.step - before.step
    return found


def _generates(row: Row) -> bool:
    made_by = row.values.get(GENERATE_NODE_S, 0.0) + row.values.get(OWN_GENERATE_S, 0.0)
    return row.values.get(GENERATE_S, 0.0) > 0 and made_by > 0


def _step(begun: Row, took_s: float, steps: float) -> MeasuredStep:
    generated_s = begun.values[GENERATE_S]
    nodes = begun.values.get(GENERATE_NODE_S, 0.0) / generated_s
    own_s = begun.values.get(OWN_GENERATE_S, 0.0)
    if own_s:  # a drought's first step waits for nodes before it begins, and no other does
        took_s = max(generated_s, took_s - begun.values.get(WAIT_S, 0.0))
    ahead_s = min(generated_s, begun.values.get(AHEAD_S, 0.0))
    return MeasuredStep(
        took_s / steps, generated_s / steps, nodes, begun.tokens / steps, own_s / steps, ahead_s / steps
    )
