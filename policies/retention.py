"""Which checkpoints of a run may go.

Every rule names what stays; only what no rule names is retired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.vocabulary import PolicyVersion


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint that the store holds. A pinned one stays until it is unpinned."""

    version: PolicyVersion
    pinned: bool = False


def retired(
    checkpoints: Sequence[Kept],
    keep_last: int,
    keep_every_steps: int | None,
    excursion_began_step: int | None,
) -> tuple[PolicyVersion, ...]:
    """Return the versions that may go, oldest first. With `keep_last` >= 1 one always stays.

    What stays: the newest `keep_last` of the newest timeline; while it has fewer, the newest one of the timeline
    before it too, for a fork must not leave the run with nothing; on every timeline what is pinned and what lies
    on a multiple of `keep_every_steps`; and the newest one from before `excursion_began_step`, which is the last
    that the present KL excursion has not touched, however long the excursion lasts.

    A timeline exists here once it has a checkpoint: until then, whoever forks it pins the one it starts from.
    """
    versions = sorted(one.version for one in checkpoints)
    stays = {one.version for one in checkpoints if one.pinned}
    stays |= _newest(versions, keep_last)
    if keep_every_steps is not None:
        stays |= {version for version in versions if version.step % keep_every_steps == 0}
    if excursion_began_step is not None:
        stays.update([version for version in versions if version.step < excursion_began_step][-1:])
    return tuple(version for version in versions if version not in stays)


def excursion_began(kl: Sequence[tuple[int, float | None]], limit: float | None) -> int | None:
    """Return the first step of the stretch above `limit` that lasts until now, or None where the KL is calm.

    `kl` is (step, KL) in the order of steps; None is a value that was not finite, and counts as above. Without a
    limit nothing is an excursion. This threshold is what retention needs, so as not to let the last good
    checkpoint go; it is no detector of divergence: it knows neither trends nor noise, and acts on nothing.
    """
    if limit is None:
        return None
    began = None
    for step, value in reversed(kl):
        if value is not None and value <= limit:
            break
        began = step
    return began


def _newest(versions: Sequence[PolicyVersion], keep_last: int) -> set[PolicyVersion]:
    """The newest of the newest timeline and, where these are too few, the newest one before it."""
    if not versions:
        return set()
    timeline = [version for version in versions if version.timeline == versions[-1].timeline]
    before = versions[: len(versions) - len(timeline)]
    return set(timeline[-keep_last:]) | set(before[-1:] if len(timeline) < keep_last else ())
