"""Which stored completions of a run may go: all but those that a restart may need again, and a sample.

They are large: a token takes 26 bytes, so a step of 1,024 completions of 4,000 tokens takes 108 MB, and 5,000 such
steps 540 GB.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.ledger.retention import on_probation
from policies.model.timelines import Fork, lineage, on_lineage
from policies.model.vocabulary import PolicyVersion

# The newest checkpoint may turn out damaged; a restart from the one before needs its completions, too.
RESTARTS_FROM = 2


def versions_to_delete(
    stored: Sequence[PolicyVersion],
    checkpoints: Sequence[PolicyVersion],
    keep_last: int,
    sample_steps: int,
    forks: Sequence[Fork],
) -> tuple[PolicyVersion, ...]:
    """Return the policy versions whose stored completions no restart needs, in order.

    What stays: on the newest timeline, all since the oldest of the newest `keep_last` checkpoints (at least two)
    of its line; on earlier ones, whose seeds differ so that nothing of them is ever replayed, all until every
    rollback has passed its probation; on the line, multiples of `sample_steps` for good; and everything of a
    timeline that `forks` does not know.
    """
    newest = max((fork.timeline for fork in forks), default=0)
    stretches = lineage(forks, newest)
    line = [version for version in sorted(checkpoints) if on_lineage(version, stretches)]
    oldest = line[-max(keep_last, RESTARTS_FROM) :][:1]
    since_step = oldest[0].step if oldest else 0
    waiting = bool(on_probation(line, forks)) or not line

    def stays(version: PolicyVersion) -> bool:
        if version.timeline > newest or (version.step % sample_steps == 0 and on_lineage(version, stretches)):
            return True
        return version.step >= since_step if version.timeline == newest else waiting

    return tuple(version for version in sorted(set(stored)) if not stays(version))
