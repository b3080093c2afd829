"""What a step consists of, told from the steps that were made: `StepShape` of `how_many`, measured.

Generation does not shrink to nothing with ever more nodes: the longest completion is made one token after the
other, and all nodes load a policy at once. That part is told from the other once fleets of clearly unlike size
have generated, which on spot they soon have: seconds a token as c + b/n, by least squares. Until then all of it
is taken to be shared, so that the first estimate of n* is rather too high, and is mended as the fleet shrinks.
Seconds are taken per token, for completions grow as a policy learns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from policies.fleet.how_many import StepShape

RECENT = 20  # steps, also of each size of fleet
ENOUGH = 3  # steps, before anything is told from them
UNLIKE = 1.5  # times as many nodes, before a fit is worth more than its noise


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step: seconds in all, of these in which completions were made, by how many nodes, and the tokens; and of
    those seconds the ones in which the trainer made them, for no node was there, and those in which it was at work
    on earlier steps."""

    took_s: float
    generated_s: float
    nodes: float
    tokens: float
    own_s: float = 0.0
    ahead_s: float = 0.0


def shape_of(steps: Sequence[MeasuredStep]) -> StepShape | None:
    """Return what the newest steps with nodes consist of; None before there are enough.

    `steps` are in the order of time.
    """
    steps = [step for step in steps if not step.own_s]
    if len(steps) < ENOUGH:
        return None
    recent = steps[-RECENT:]
    tokens = median(max(1.0, step.tokens) for step in recent)
    other_s = median(max(0.0, step.took_s - step.generated_s + step.ahead_s) for step in recent)
    tail_s, shared_node_s = _split(_seconds_a_token(steps))
    if any(step.ahead_s for step in recent):
        return StepShape(other_s, shared_node_s * tokens, ahead_s=tail_s * tokens)
    return StepShape(other_s + tail_s * tokens, shared_node_s * tokens)


def own_shape_of(steps: Sequence[MeasuredStep]) -> StepShape | None:
    """The same of the newest steps whose completions the trainer made itself, as if by one node; None before there
    is one."""
    own = [step for step in steps if step.own_s > step.generated_s / 2][-ENOUGH:]
    if not own:
        return None
    other_s = median(max(0.0, step.took_s - step.generated_s) for step in own)
    return StepShape(other_s, median(step.generated_s for step in own))


def _seconds_a_token(steps: Sequence[MeasuredStep]) -> dict[int, float]:
    """By the number of nodes; the newest steps of each."""
    found = defaultdict[int, list[float]](list)
    for step in steps:
        found[max(1, round(step.nodes))].append(step.generated_s / max(1.0, step.tokens))
    newest = max(1, round(steps[-1].nodes))
    return {n: median(seconds[-RECENT:]) for n, seconds in found.items() if len(seconds) >= ENOUGH or n == newest}


def _split(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Return c and b of c + b/n, neither negative."""
    if max(seconds) < UNLIKE * min(seconds):
        return 0.0, fmean(n * each_s for n, each_s in seconds.items())
    x_mean = fmean(1 / n for n in seconds)
    y_mean = fmean(seconds.values())
    spread = sum((1 / n - x_mean) ** 2 for n in seconds)
    shared = sum((1 / n - x_mean) * (each_s - y_mean) for n, each_s in seconds.items()) / spread
    if shared <= 0:
        return y_mean, 0.0
    if (tail := y_mean - shared * x_mean) < 0:
        return 0.0, sum(each_s / n for n, each_s in seconds.items()) / sum(1 / n**2 for n in seconds)
    return tail, shared
