"""Decide whether a run meets its deadline, and how many rollout nodes it needs: Uniform Progress.

After Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines" (NSDI 2024). A run of S steps
from time 0 to T should have made S t / T of them at time t. A run that is ahead may wait for spot. A run that is
behind buys on demand, and returns to spot once it is ahead by the time of two machine changes. The run aims to
finish two such changes before its deadline, so that a loss at the very end does not make it late.

The time for each remaining step gives the number of nodes: a step takes a + b/n (`steps.StepShape`), so T seconds
a step need n = b / (T - a).
"""

from __future__ import annotations

import math
from calendar import timegm  # arithmetic on dates; it reads no clock
from dataclasses import dataclass

from grpo_orch.policies.costs.steps import StepShape
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.model.vocabulary import Market, Role, kind_of
from grpo_orch.policies.tick.snapshot import BEFORE_TRAINING, Trainer

CHANGES = 2  # machine changes kept in reserve; a run that was behind must be this far ahead again
RESERVE_SHARE = 0.1  # maximum reserve, as a share of the whole time
LATE_SHARE = 0.1  # of the remaining time: a run that will miss the deadline by more is not sped up
SPARE_SHARE = 0.1  # of the time for a step: nodes are returned once fewer leave this much to spare
BOOT_S = 300.0  # of a rollout node, before one has served


@dataclass(frozen=True, slots=True)
class DeadlineProgress:
    """A run's progress towards its deadline. Times: seconds since the epoch; `step` is less than `steps`."""

    now_s: float
    started_s: float  # when its trainer first trained
    deadline_s: float
    change_s: float  # from a request until a node works
    step: int
    steps: int

    @property
    def steps_left(self) -> int:
        return self.steps - self.step

    @property
    def target_s(self) -> float:
        """When the run should end: the deadline less the reserve."""
        whole_s = max(0.0, self.deadline_s - self.started_s)
        return self.deadline_s - min(CHANGES * self.change_s, RESERVE_SHARE * whole_s)

    @property
    def step_s(self) -> float:
        """Seconds for each remaining step; 0 once no time remains."""
        return max(0.0, self.target_s - self.now_s) / self.steps_left

    def expected(self, in_s: float = 0.0) -> float:
        """Return the steps that even progress has made by now, or `in_s` seconds later."""
        whole_s = self.target_s - self.started_s
        passed = (self.now_s + in_s - self.started_s) / whole_s if whole_s > 0 else 1.0
        return self.steps * min(1.0, max(0.0, passed))

    @property
    def is_behind(self) -> bool:
        return self.step < math.floor(self.expected())

    @property
    def is_safe(self) -> bool:
        """Whether the run stays ahead through CHANGES machine changes."""
        return self.step >= self.expected(CHANGES * self.change_s)

    def end_s(self, shape: StepShape, nodes: int) -> float:
        """Return when the run ends with this many nodes (at least 1) and no losses."""
        return self.now_s + self.steps_left * shape.seconds(nodes)

    def is_late(self, shape: StepShape, max_nodes: int) -> bool:
        """Whether even `max_nodes` miss the deadline by more than the measurement error."""
        end_s = self.end_s(shape, max_nodes)
        return end_s - LATE_SHARE * (end_s - self.now_s) > self.deadline_s


def nodes_for(progress: DeadlineProgress, shape: StepShape, max_nodes: int, spare: float = 0.0) -> int:
    """Return how many nodes finish the remaining steps in time; 0 if not even `max_nodes` do.

    Args:
        progress: the run's progress.
        shape: of a step, as measured.
        max_nodes: upper limit.
        spare: a share of each step's time to leave unused.
    """
    if progress.is_late(shape, max_nodes):
        return 0
    needed = shape.nodes((1 - spare) * progress.step_s)
    return max_nodes if needed >= max_nodes else max(1, math.ceil(needed))


def deadline_progress(
    state: RunState, spec: RunSpec, trainer: Trainer | None, now_s: float
) -> DeadlineProgress | None:
    """Return the run's progress towards its deadline; None without one, or while no trainer trains.

    A trainer that restores does not report its step, and without `grpo.max_steps` the number of remaining steps
    is unknown.
    """
    deadline, started_s = spec.policies.fleet.deadline, state.proved_at_s
    if deadline is None or started_s is None or trainer is None or trainer.activity in BEFORE_TRAINING:
        return None
    if trainer.timeline != state.timeline or trainer.step >= trainer.max_steps:
        return None
    change_s = min(boot_s(state), spec.policies.boot_timeout_s)
    return DeadlineProgress(now_s, started_s, time_of(deadline), change_s, trainer.step, trainer.max_steps)


def boot_s(state: RunState) -> float:
    """Seconds from a rollout node's request until it works, as last seen: on demand, else on spot."""
    kinds = [state.kinds.get(kind_of(Role.ROLLOUT, market)) for market in (Market.ON_DEMAND, Market.SPOT)]
    return next((kind.boot_s for kind in kinds if kind is not None and kind.boot_s is not None), BOOT_S)


def nodes_in_time(progress: DeadlineProgress | None, shape: StepShape, max_nodes: int, present: int) -> int:
    """Return how many rollout nodes the deadline needs; 0: it sets no minimum.

    Fewer than `present`, the nodes that exist or are wanted, only once they leave SPARE_SHARE of each step's time.
    """
    if progress is None:
        return 0
    needed = nodes_for(progress, shape, max_nodes)
    return min(present, nodes_for(progress, shape, max_nodes, SPARE_SHARE)) if 0 < needed < present else needed


def time_of(deadline: str) -> float:
    """Convert a stored deadline such as `2026-11-30T18:00:00Z` to seconds since the epoch."""
    date, _, clock = deadline.removesuffix("Z").partition("T")
    year, month, day = (int(part) for part in date.split("-"))
    hour, minute, second = (int(part) for part in clock.split(":"))
    return float(timegm((year, month, day, hour, minute, second)))
