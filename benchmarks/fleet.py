"""What the controller's tick costs with many nodes, and what a dollar buys under each fleet policy and climate.

`make bench-fleet` prints a table and one line of JSON: `tick_ms: {nodes: ms}`, the processor's time for a settled
tick of the production controller over a store in memory, the median; `goodput_per_dollar: {climate: {policy: ratio
to all on demand}}` and `oracle_share: {climate: ours / oracle}` over a day of each climate; `article`: the USD
of a day without preemption for an H200 on demand and a pair on spot, beside three on demand.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from dataclasses import replace
from types import MappingProxyType

import structlog

from orchestrator.clouds.protocol import Order
from orchestrator.simulate.climates import CLIMATES, climate
from orchestrator.simulate.contest.compare import compete
from orchestrator.simulate.contest.contenders import ON_DEMAND
from orchestrator.simulate.contest.oracle import ORACLE
from orchestrator.simulate.physics import Physics, Prices
from orchestrator.simulate.world import World
from policies.model.spec import Dataset, Replicas, RolloutSpec, RunSpec, TrainerSpec
from policies.model.state import Node, Slot
from policies.model.vocabulary import Market, NodePhase, Role, kind_of, node_id_of, slot_of

NODES = (100, 1_000, 10_000)
TICKS = 9
HOURS = 24.0  # of each policy in each climate; five minutes of one quiet core in all
FLEET = 4  # rollout nodes at most, where policies are compared
PHYSICS = Physics(save_steps=20)
INSTANT = replace(PHYSICS, launch_s=0.0, setup_s=0.0, first_weights_s=0.0, weights_s=0.0)


def spec(nodes: int, least: int = 1) -> RunSpec:
    trainer = TrainerSpec(model="m", dataset=Dataset(path="d"), reward_funcs=("r.f",))
    rollout = RolloutSpec(replicas=Replicas(min=least, max=nodes))
    return RunSpec(name="bench", storage="sim://run", trainer=trainer, grpo={}, rollout=rollout)


def tick_ms(nodes: int) -> float:
    """Milliseconds of a settled tick with so many nodes that serve, the cloud's listing included."""
    world = World(0, spec(nodes, nodes), physics=INSTANT, max_steps=10**9)
    assert world.newest is not None
    controller, clock = world.newest.controller, world.newest.clock
    found = [_serving(slot_of(Role.ROLLOUT, place), clock.now_s()) for place in range(nodes)]
    for node in found:
        world.cloud.launch(Order(node.id, node.role, node.market, node.attempt, {}))
    state = controller.state
    controller.state = replace(
        state,
        proved=True,
        nodes=MappingProxyType({**state.nodes, **{node.id: node for node in found}}),
        slots=MappingProxyType({**state.slots, **{node.slot: Slot(incarnations=1) for node in found}}),
    )
    world.run_for(30.0)
    serving = [node for node in controller.state.live(Role.ROLLOUT) if node.phase is NodePhase.SERVING]
    assert len(serving) == nodes == len(world.cloud.bought) - 1
    took = []
    for _ in range(TICKS):
        began = time.process_time()
        controller.tick(clock.now_s())
        took.append((time.process_time() - began) * 1000)
    return statistics.median(took)


def _serving(slot: str, now_s: float) -> Node:
    kind = kind_of(Role.ROLLOUT, Market.SPOT)
    node = node_id_of(slot, 1)
    phase = NodePhase.SERVING
    return Node(node, Role.ROLLOUT, slot, 1, Market.SPOT, phase, now_s, now_s, kind=kind, served=True)


def article_usd() -> tuple[float, float]:
    """A day's USD, with a pair on spot and with all on demand."""
    found = dict(compete(spec(2, 2), climate("unclouded", 0, 2), INSTANT, Prices(), 24.0))
    return found["ours"].usd, found[ON_DEMAND].usd


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    ticks = {nodes: round(tick_ms(nodes), 2) for nodes in NODES}
    for nodes, took_ms in ticks.items():
        print(f"a tick with {nodes:>6} nodes: {took_ms:8.2f} ms", flush=True)
    ratios: dict[str, dict[str, float]] = {}
    shares: dict[str, float] = {}
    for name in CLIMATES:
        found = dict(compete(spec(FLEET), climate(name, 0, FLEET), PHYSICS, Prices(), HOURS))
        base = found[ON_DEMAND].steps_per_usd
        ratios[name] = {policy: round(one.steps_per_usd / base, 3) for policy, one in found.items()}
        shares[name] = round(found["ours"].steps_per_usd / found[ORACLE].steps_per_usd, 3)
        told = "  ".join(f"{policy} {ratio:.2f}" for policy, ratio in ratios[name].items())
        print(f"{name:10} {told}", flush=True)
    mixed, on_demand = article_usd()
    print(f"a day without preemption: {mixed:.2f} USD, all on demand {on_demand:.2f} USD")
    figures = {
        "tick_ms": {str(nodes): took_ms for nodes, took_ms in ticks.items()},
        "goodput_per_dollar": ratios,
        "oracle_share": shares,
        "article": {"ours_usd": round(mixed, 2), "on_demand_usd": round(on_demand, 2)},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
