"""What the detectors say of the run, journalled: it diverges, may diverge, is healthy again, or has a pitfall."""

from __future__ import annotations

from policies.control.tick import Tick
from policies.detect.divergence import Health, Verdict
from policies.model.events import Diverged, DivergenceCleared, DivergenceWatched, Noticed


def note_health(tick: Tick) -> None:
    """Journal a change of what the detectors say."""
    state = tick.state
    if state.diverged is not None:
        return
    verdict, seen_by = _verdict(tick)
    if verdict is None:
        return
    onset_step = verdict.step if verdict.onset_step is None else verdict.onset_step
    if verdict.health is Health.TRIPPED:
        step = verdict.step if verdict.tripped_step is None else verdict.tripped_step
        event = Diverged(state.timeline, step, onset_step, verdict.evidence, seen_by)
        tick.emit(event, f"diverged since step {onset_step}")
    elif verdict.health is Health.WATCH and state.watched is None:
        watched = DivergenceWatched(state.timeline, verdict.step, onset_step, verdict.evidence)
        tick.emit(watched, f"watched since step {onset_step}")
    elif verdict.health is Health.HEALTHY and state.watched is not None:
        tick.emit(DivergenceCleared(state.timeline, verdict.step), "healthy again")


def _verdict(tick: Tick) -> tuple[Verdict | None, str]:
    """Return what the detectors say of the present timeline, and whose: the trainer's own, unless only the
    controller's have tripped."""
    beat, watched, timeline = tick.snapshot.trainer, tick.snapshot.watched, tick.state.timeline
    theirs = beat.verdict if beat is not None and beat.timeline == timeline else None
    ours = watched.verdict if watched is not None and watched.timeline == timeline else None
    tripped = ours is not None and ours.health is Health.TRIPPED
    if theirs is None or (tripped and theirs.health is not Health.TRIPPED):
        return ours, "controller"
    return theirs, "trainer"


def note_pitfalls(tick: Tick) -> None:
    """Journal each pitfall once."""
    watched = tick.snapshot.watched
    for found in watched.pitfalls if watched is not None and watched.timeline == tick.state.timeline else ():
        if found.step > tick.state.noticed.get(found.kind, -1):
            tick.emit(Noticed(found.kind, found.step, found.text), f"noticed: {found.kind}")
