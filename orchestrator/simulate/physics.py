"""How long things take, and what they cost, in the simulated world."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

EPOCH_S = 1.7e9  # of the simulated clocks' zero


@dataclass(frozen=True, slots=True)
class Physics:
    """A step takes `fixed_s + generation_node_s / n` seconds on n nodes.

    A machine is there `launch_s` after it was asked for, and set up `setup_s` later; a rollout node then takes the
    weights, the first of a fleet in `first_weights_s` from the store, others in `weights_s` from it. Each of these
    times differs from machine to machine by up to `spread`, a share of it.

    A trainer that generates by itself takes `own_slower` times as long for it as one node: on as many GPUs, by
    transformers' `generate` and not by vLLM.
    """

    fixed_s: float = 60.0
    generation_node_s: float = 120.0
    launch_s: float = 60.0
    setup_s: float = 120.0
    first_weights_s: float = 120.0
    weights_s: float = 30.0
    spread: float = 0.3
    own_slower: float = 10.0
    take_back_s: float = 120.0  # from a cloud's notice to the end
    noticed: float = 0.7  # the share of machines that are taken with a notice
    save_steps: int = 5
    behind_steps: int = 100  # so far ahead of the store a trainer may go

    def step_s(self, nodes: float) -> float:
        """Seconds of a step on so many nodes, a slower one counting for less."""
        return self.fixed_s + self.generation_node_s / nodes

    def about(self, usual_s: float, random: Random) -> float:
        return usual_s * random.uniform(1 - self.spread, 1 + self.spread)


@dataclass(frozen=True, slots=True)
class Prices:
    """USD an hour of one machine. The defaults: an H200 on demand, and half of a pair of H200 on spot."""

    trainer_usd_per_h: float = 3.96
    node_usd_per_h: float = 3.96
    spot_usd_per_h: float = 1.19


# A step a second or so, and machines that come within minutes: for stories in which faults are what takes time.
BRISK = Physics(
    fixed_s=3.0,
    generation_node_s=4.0,
    launch_s=30.0,
    setup_s=40.0,
    first_weights_s=20.0,
    weights_s=10.0,
    spread=0.2,
)
