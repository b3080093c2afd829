"""What it brings and costs to heed a cloud's word that a machine is at risk, beside a run to which none says it.

`make bench-risk` prints a table and a line of JSON: for climates in which most such machines are taken within
minutes and in which most live on, for fleets of unlike size and nodes that start quickly or slowly, the USD a step
of both, over all seeds, and the median of the ratio; how many such words there were, and machines bought early.

`--seeds N` takes more or fewer seeds of each.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import median

import structlog

from benchmarks.fleet import spec
from checkpoint.journal import journal
from orchestrator.simulate.climates import climate
from orchestrator.simulate.contest.contenders import CONTENDERS
from orchestrator.simulate.physics import Physics
from orchestrator.simulate.world import COARSE, World
from policies.model.events import NodeRequested, RiskTold
from policies.model.vocabulary import Role

HOURS = 24.0
SEEDS = 3
CLIMATES = ("foretold", "false-alarms")
FLEETS = (1, 2)  # rollout nodes at most
QUICK = Physics()  # four to six minutes from a request to a node that serves
SLOW = replace(QUICK, launch_s=180.0, setup_s=300.0, first_weights_s=200.0, weights_s=100.0)  # ten or more
PHYSICS = {"quick": QUICK, "slow": SLOW}

Job = tuple[str, str, int, int]  # climate, how nodes start, how many, seed
Lived = tuple[float, float, int, int]  # steps, USD, words of risk, machines bought early


def measure(job: Job) -> tuple[Lived, Lived]:
    """A run that heeds such words, and one that does not hear them."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    return _live("ours", job), _live("deaf", job)


def _live(policy: str, job: Job) -> Lived:
    name, starts, nodes, seed = job
    world = World(
        seed,
        spec(nodes),
        weather=climate(name, seed, nodes),
        physics=PHYSICS[starts],
        max_steps=10**9,
        decide=CONTENDERS[policy].decide,
        rhythm=COARSE,
        logs=True,
    )
    world.run_for(HOURS * 3600 - world.time_s)
    assert world.newest is not None
    events = [event for entry in journal.read(world.newest.store) for event in entry.decoded()]
    early = sum(isinstance(event, NodeRequested) and bool(event.relieves) for event in events)
    steps = max(
        [float(world.work.stored_step), *(box.step for box in world.cloud.of(Role.TRAINER) if not box.gone)]
    )
    return steps, world.spent_usd, sum(isinstance(event, RiskTold) for event in events), early


@dataclass(frozen=True, slots=True)
class Told:
    """Of one climate, start and size, over seeds."""

    usd_a_step: float
    deaf_usd_a_step: float
    ratio: float
    words: int
    early: int

    @classmethod
    def of(cls, pairs: list[tuple[Lived, Lived]]) -> Told:
        ours, deaf = (sum(one[who][1] for one in pairs) / sum(one[who][0] for one in pairs) for who in (0, 1))
        ratio = median(one[0][1] / one[0][0] / (one[1][1] / one[1][0]) for one in pairs)
        return cls(ours, deaf, ratio, sum(one[0][2] for one in pairs), sum(one[0][3] for one in pairs))

    @property
    def line(self) -> str:
        said = f"{self.words} words, {self.early} bought early"
        return f"{self.usd_a_step:.4f} / {self.deaf_usd_a_step:.4f}, {self.ratio:.3f} in the median; {said}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seeds", type=int, default=SEEDS)
    seeds = arguments.parse_args().seeds
    kinds = list(product(CLIMATES, PHYSICS, FLEETS))
    jobs = [(*kind, seed) for kind in kinds for seed in range(seeds)]
    found = {}
    print(f"{HOURS:.0f} h, {seeds} seeds; USD a step, heeded / not heard", flush=True)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        lived = pool.map(measure, jobs)
        for name, starts, nodes in kinds:
            told = Told.of([next(lived) for _ in range(seeds)])
            print(f"{name:12} {starts:5} {nodes} nodes: {told.line}", flush=True)
            found[f"{name} {starts} {nodes}"] = asdict(told)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
