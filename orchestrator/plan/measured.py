"""What a run's own log tells, in the place of estimates."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

from checkpoint.records import metrics
from checkpoint.records.metrics import logged, read_metrics, step_times
from checkpoint.store import layout
from checkpoint.store.run_store import Store
from policies.fleet.how_many import StepShape
from policies.fleet.measuring import shape_of
from policies.ledger.accounting import surviving_rows

LAST_STEPS = 50  # completions change their length as a run goes on
COMPLETION_TOKENS = "completions/mean_length"  # TRL's


@dataclass(frozen=True, slots=True)
class Measured:
    """Of the last LAST_STEPS logged steps. None: it was not logged.

    Attributes:
        steps: over how many.
        step_s: the median, from one logged step to the next.
        generated_s: the median of what completions take of it.
        shape: what of a step nodes share, by the rule that the controller buys by.
        completion_tokens: of a completion, on average.
        sent_share: bytes that went to the store, of those that the published weights have.
    """

    steps: int
    step_s: float
    generated_s: float | None = None
    shape: StepShape | None = None
    completion_tokens: float | None = None
    sent_share: float | None = None


def measure(store: Store) -> Measured | None:
    """Read the log of the run in this store; None where there is no run, or it has not made two steps.

    Raises StoreError.
    """
    if store.get_or_none(layout.RUN) is None:
        return None
    rows = surviving_rows(read_metrics(store))
    rows = [one for one in rows if one.timeline == rows[-1].timeline][-LAST_STEPS - 1 :]
    gaps = [(after.time_s - before.time_s) / (after.step - before.step) for before, after in pairwise(rows)]
    if not gaps:
        return None
    timed, lengths = step_times(rows), logged(rows[1:], COMPLETION_TOKENS)
    sent, whole = (sum(logged(rows[1:], name)) for name in (metrics.PUBLISHED_BYTES, metrics.WEIGHTS_BYTES))
    return Measured(
        steps=len(gaps),
        step_s=median(gaps),
        generated_s=median(one.generated_s for one in timed) if timed else None,
        shape=shape_of(timed),
        completion_tokens=mean(lengths) if lengths else None,
        sent_share=sent / whole if whole else None,
    )
