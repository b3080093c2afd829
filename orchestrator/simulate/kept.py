"""The simulated world's run store: what it keeps of the checkpoints that its trainer saves."""

from __future__ import annotations

from collections.abc import Sequence

from policies.detect.divergence import Verdict
from policies.ledger.retention import RetentionRules, StoredCheckpoint, keep_before, keep_since, versions_to_retire
from policies.model.spec import CheckpointsSpec
from policies.model.timelines import Fork
from policies.model.vocabulary import PolicyVersion


def stored(
    listed: Sequence[PolicyVersion],
    new: PolicyVersion,
    verdict: Verdict,
    forks: Sequence[Fork],
    spec: CheckpointsSpec,
    logging_steps: int = 1,
) -> list[PolicyVersion]:
    """Return what is listed once `new` is, and retention was applied as the uploader does: with what the trainer's
    guard said when it sealed `new`, and the forks that are in the store after its listing."""
    held = sorted({*listed, new})
    rules = RetentionRules(
        spec.keep_last,
        spec.keep_every_steps,
        keep_before(new.step, verdict, logging_steps),
        keep_since(new.step, logging_steps),
    )
    gone = versions_to_retire([StoredCheckpoint(one) for one in held], forks, rules)
    return [one for one in held if one not in gone]
