"""A plan against `policies.fleet.deadline`: how many nodes keep it, and when the run is expected to end."""

from __future__ import annotations

from orchestrator.plan.model import DeadlinePlan
from orchestrator.plan.workload import steps_of
from policies.control.fleet.deadline import BOOT_S
from policies.fleet.deadline import Course, nodes_for, time_of
from policies.fleet.how_many import StepShape
from policies.model.spec import RunSpec


def plan_deadline(spec: RunSpec, shape: StepShape | None, pays: int, now_s: float) -> DeadlinePlan | None:
    """Return what the deadline takes of a run that begins now; None where it has none.

    Args:
        spec: the run's.
        shape: of a step; None where nobody can tell.
        pays: rollout nodes that there would be without a deadline.
        now_s: seconds since the epoch.
    """
    named, steps = spec.policies.fleet.deadline, steps_of(spec)
    if named is None:
        return None
    deadline_s, most = time_of(named), max(1, spec.rollout.replicas.max)
    if shape is None or steps is None:
        return DeadlinePlan(deadline_s=deadline_s, nodes=max(1, pays), end_s=None, kept=None)
    begins_s = now_s + BOOT_S
    course = Course(begins_s, begins_s, deadline_s, BOOT_S, 0, steps)
    nodes = max(1, pays, nodes_for(course, shape, most))
    kept = course.end_s(shape, nodes) <= deadline_s
    end_s = course.end_s(shape, nodes if kept else most)
    return DeadlinePlan(deadline_s=deadline_s, nodes=nodes, end_s=end_s, kept=kept)
