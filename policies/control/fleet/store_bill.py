"""What the run's store costs, as the controller counts and journals it: `policies.fleet.store_costs`."""

from __future__ import annotations

from policies.control.tick import Tick
from policies.fleet.store_costs import (
    AT_HOME,
    Place,
    Stored,
    Tariff,
    Use,
    checkpoint_bytes,
    of_control,
    of_fetch,
    of_send,
    of_steps,
    tariff_of,
)
from policies.model.events import StoreCharged
from policies.model.events.money import CHARGED_EVERY_S
from policies.model.phases import TERMINAL_RUN
from policies.model.processes import alternatives_of
from policies.model.spec import RunSpec
from policies.model.state import RunState
from policies.model.vocabulary import NodePhase, Role

CHARGED_USD = 1.0  # or as soon as it is so much
LEAST_USD = 0.01  # at the end of a run


def charge_store(tick: Tick) -> None:
    """Journal what the store has cost, now and then."""
    due, usd = _due(tick), pending_usd(tick)
    waited_s = tick.waited_s(tick.state.store_charged_at_s)
    ends = tick.state.phase in TERMINAL_RUN and usd >= LEAST_USD
    if usd <= 0 or not (ends or usd >= CHARGED_USD or waited_s >= CHARGED_EVERY_S):
        return
    until_s = max(tick.state.store_until_s, tick.snapshot.stored.until_s)
    requests, sent, fetched = round(due.puts + due.gets), round(due.sent_bytes), round(due.fetched_bytes)
    tick.emit(StoreCharged(usd, requests, sent, fetched, until_s), f"the store has cost {usd:.2f} USD more")


def pending_usd(tick: Tick) -> float:
    """What it has cost that is not journalled yet."""
    return _tariff(tick).usd(_due(tick))


def usd_per_h(tick: Tick) -> float:
    """What steering asks of it in an hour."""
    return _tariff(tick).usd(of_control(3600.0, len(tick.state.nodes)))


def stop_usd(tick: Tick) -> float:
    """What is still to be stored, should the run be stopped now: a checkpoint, and a step that is under way."""
    policy_bytes = tick.snapshot.stored.policy_bytes
    step = of_send(policy_bytes) + of_fetch(_serving(tick) * policy_bytes)
    return _tariff(tick).usd(of_send(checkpoint_bytes(policy_bytes, tick.spec)) + step)


def join_usd(tick: Tick, role: Role) -> float:
    """What a machine fetches before it works."""
    policy_bytes = tick.snapshot.stored.policy_bytes
    size = checkpoint_bytes(policy_bytes, tick.spec) if role is Role.TRAINER else policy_bytes
    return _tariff(tick).usd(of_fetch(size))


def machines_at(state: RunState, spec: RunSpec) -> Place:
    """Where the run's machines are: where one is known to be, else the only place that run.yaml names."""
    if spec.cloud != "sky":
        return AT_HOME
    pools = [node.pool for role in Role for node in state.live(role) if node.pool is not None]
    if pools:
        return Place(pools[0].cloud, pools[0].region)
    named = [str(one.get("infra") or one.get("cloud") or "*") for one in alternatives_of(spec.trainer.resources)]
    places = {tuple(place.lower().split("/")[:2]) for place in named}
    if len(places) != 1 or "*" in (only := places.pop())[0]:
        return Place("")
    return Place(only[0], only[1] if len(only) > 1 and only[1] != "*" else "")


def _due(tick: Tick) -> Use:
    state, stored = tick.state, tick.snapshot.stored
    if stored.until_s <= state.store_until_s:
        stored = Stored(policy_bytes=stored.policy_bytes)
    asked_s = max(0.0, tick.waited_s(state.store_charged_at_s)) if state.store_charged_at_s else 0.0
    checkpoint = checkpoint_bytes(stored.policy_bytes, tick.spec)
    joins = of_fetch(state.joined_rollouts * stored.policy_bytes + state.joined_trainers * checkpoint)
    joins += of_send(state.stopped_trainers * checkpoint)
    return of_steps(stored, _serving(tick), tick.spec) + joins + of_control(asked_s, len(state.nodes))


def _serving(tick: Tick) -> int:
    """How many rollout nodes fetch what is published."""
    nodes = tick.state.nodes.values()
    return sum(node.phase is NodePhase.SERVING and node.role is Role.ROLLOUT for node in nodes)


def _tariff(tick: Tick) -> Tariff:
    return tariff_of(tick.snapshot.store_place, machines_at(tick.state, tick.spec))
