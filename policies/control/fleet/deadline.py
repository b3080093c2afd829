"""The run's deadline, as the controller steers by it: `policies.fleet.deadline`, asked of the tick's state."""

from __future__ import annotations

from policies.control.snapshot import BEFORE_TRAINING, Trainer
from policies.control.tick import Tick
from policies.fleet.deadline import SPARE_SHARE, Course, nodes_for, time_of
from policies.fleet.how_many import StepShape
from policies.model.events import DeadlineMissed
from policies.model.phases import LIVE_RUN
from policies.model.spec import RunSpec
from policies.model.state import RunState
from policies.model.vocabulary import Market, Role, kind_of

BOOT_S = 300.0  # of a rollout node, before one has served


def course_of(state: RunState, spec: RunSpec, trainer: Trainer | None, now_s: float) -> Course | None:
    """Return where the run is on the way to its deadline; None where it has none, or while no trainer trains: one
    that restores does not say how far it is, and without `grpo.max_steps` not how much there is to do either."""
    deadline, begun_s = spec.policies.fleet.deadline, state.proved_at_s
    if deadline is None or begun_s is None or trainer is None or trainer.activity in BEFORE_TRAINING:
        return None
    if trainer.timeline != state.timeline or trainer.step >= trainer.max_steps:
        return None
    change_s = min(boot_s(state), spec.policies.boot_timeout_s)
    return Course(now_s, begun_s, time_of(deadline), change_s, trainer.step, trainer.max_steps)


def boot_s(state: RunState) -> float:
    """Seconds from a rollout node's request until it works, as last seen: on demand, else on spot."""
    kinds = [state.kinds.get(kind_of(Role.ROLLOUT, market)) for market in (Market.ON_DEMAND, Market.SPOT)]
    return next((one.boot_s for one in kinds if one is not None and one.boot_s is not None), BOOT_S)


def course_now(tick: Tick) -> Course | None:
    """As `course_of`, of the tick."""
    return course_of(tick.state, tick.spec, tick.snapshot.trainer, tick.snapshot.now_s)


def is_behind(tick: Tick) -> bool:
    """Whether fewer steps are made than a run of even progress had by now."""
    course = course_now(tick)
    return course is not None and course.is_behind


def nodes_in_time(tick: Tick, shape: StepShape, present: int) -> int:
    """Return how many rollout nodes the deadline takes, where `present` are there or wanted; 0: it asks for none.

    Fewer than present are enough only once they leave a tenth of each step's time over.
    """
    if (course := course_now(tick)) is None:
        return 0
    most = tick.spec.rollout.replicas.max
    needed = nodes_for(course, shape, most)
    return min(present, nodes_for(course, shape, most, SPARE_SHARE)) if 0 < needed < present else needed


def deadline_words(tick: Tick, nodes: int) -> str:
    """`; 3 keep the deadline: 120 steps are left, each of 90.0 s`; empty where it asks for none."""
    course = course_now(tick)
    if course is None or not nodes:
        return ""
    return f"; {nodes} keep the deadline: {course.left} steps are left, each of {course.step_s:.1f} s"


def tell_late(tick: Tick) -> None:
    """Journal once that the deadline is out of reach; the run goes on as fast as pays."""
    if tick.state.deadline_missed or tick.state.phase not in LIVE_RUN or (course := course_now(tick)) is None:
        return
    shape, most = tick.snapshot.step_shape, tick.spec.rollout.replicas.max
    if shape is None or most == 0:
        if course.now_s > course.deadline_s:
            event = DeadlineMissed(course.deadline_s, None, course.step, course.steps, most, None)
            tick.emit(event, f"the deadline has passed at step {course.step} of {course.steps}")
    elif course.is_late(shape, most):
        end_s, step_s = course.end_s(shape, most), shape.seconds(most)
        event = DeadlineMissed(course.deadline_s, end_s, course.step, course.steps, most, step_s)
        late_s = end_s - course.deadline_s
        tick.emit(event, f"the deadline is out of reach: {late_s:.0f} s late even with {most} nodes")
