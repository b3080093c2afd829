"""How many of a run's checkpoints stay in its store at a time, before it is started."""

from __future__ import annotations

import math

from policies.detect.divergence import Verdict
from policies.ledger.retention import (
    NOTICED_POINTS,
    STRETCHES,
    RetentionRules,
    StoredCheckpoint,
    keep_before,
    keep_since,
    versions_to_retire,
)
from policies.model.spec import CheckpointsSpec
from policies.model.vocabulary import PolicyVersion

# What a store may take of one machine, slow and fast: what a `down` waits for reckons with the same two
# (policies.control.stopping), and Ceph's gateway took 200 MB/s (docs/benchmarks.md).
STORE_BYTES_PER_S = (100 * 10**6, 1000 * 10**6)
# Of the newest saves, beside those that stay as recent: their number grows with the logarithm of the run's length.
FOLLOWED = 300


def most_kept(rules: CheckpointsSpec, save_steps: int, logging_steps: int, steps: int) -> int:
    """Return how many checkpoints of a healthy run of so many steps stay at most, by the rules of retention."""
    saves = steps // save_steps
    first, most = max(0, saves - FOLLOWED - NOTICED_POINTS * logging_steps // save_steps), 0
    line = [StoredCheckpoint(PolicyVersion(0, step)) for step in _at_doubling_ages(save_steps, save_steps * first)]
    for step in range(save_steps * (first + 1), save_steps * saves + 1, save_steps):
        line.append(StoredCheckpoint(PolicyVersion(0, step)))
        before, since = keep_before(step, Verdict(), logging_steps), keep_since(step, logging_steps)
        gone = set(versions_to_retire(line, (), RetentionRules(rules.keep_last, None, before, since)))
        line = [one for one in line if one.version not in gone]
        most = max(most, len(line))
    if rules.keep_every_steps is None:
        return most
    return min(saves, most + steps // math.lcm(rules.keep_every_steps, save_steps))


def _at_doubling_ages(save_steps: int, newest: int) -> list[int]:
    """Steps among which are all that the rule of doubling ages keeps at that step: what it keeps has no memory."""
    found, width = {save_steps} if newest else set(), 1
    while width <= newest:
        places = range(max(0, newest // width - STRETCHES), newest // width + 1)
        oldest = (save_steps * max(1, math.ceil(place * width / save_steps)) for place in places)
        found.update(step for step in oldest if step <= newest)
        width *= 2
    return sorted(found)
