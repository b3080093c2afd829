"""The cap is never passed in any history, and a run that reaches it loses nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.control.decide import decide
from policies.control.fleet.spending import BUDGET
from policies.control.snapshot import Action, Command, LaunchRefused, Snapshot, Terminate
from policies.fleet.budget import on_demand_usd, spent_usd
from policies.fleet.store_costs import Place, Stored
from policies.ledger.rentals import bill, rentals, spent_over_time
from policies.model import exit_codes
from policies.model.events import BudgetReached, BudgetRefused, BudgetSet, NodeMoved, NodeRequested, StoreCharged
from policies.model.pools import Pool
from policies.model.spec import Budget, RunSpec
from policies.model.vocabulary import Market, NodePhase, Refusal, Role, RunPhase
from tests.stand_ins.world import World, spec

USD_PER_H = {Role.TRAINER: 36.0, Role.ROLLOUT: 3.6}


def capped(
    usd: float | None = None, usd_per_h: float | None = None, max_replicas: int = 2, at: str = "pause"
) -> RunSpec:
    return replace(spec(max_replicas), budget=Budget(usd=usd, usd_per_h=usd_per_h, at=at))  # type: ignore[arg-type]


def patient(run: RunSpec) -> RunSpec:
    """One that waits for hours for a machine."""
    return replace(run, policies=replace(run.policies, boot_timeout_s=10.0**6))


def with_disks(run: RunSpec) -> RunSpec:
    sections = replace(run.trainer, resources=DISKS), replace(run.rollout, resources=DISKS)
    return replace(run, cloud="sky", trainer=sections[0], rollout=sections[1])


@dataclass
class Priced(World):
    """Its machines cost something, and the cloud says how much; `away`: it does not answer."""

    known: bool = True
    away: bool = False
    kinds: dict[str, float] = field(
        default_factory=lambda: {"trainer on demand": 40.0, "rollout on spot": 4.0}  # the dearest of each
    )

    def snapshot(self) -> Snapshot:
        looked = super().snapshot()
        machines = {
            name: replace(one, price_usd_per_h=USD_PER_H[Role(name.partition("-")[0])])
            for name, one in self.machines.items()
        }
        return replace(looked, machines=None if self.away else machines, prices=self.kinds if self.known else None)

    @property
    def spent(self) -> float:
        return spent_usd(self.state, self.now_s)


class SlowToEnd(Priced):
    """Its cloud takes five minutes to have a machine back."""

    def act(self, action: Action) -> None:
        if isinstance(action, Terminate) and self.now_s - self.state.nodes[action.node].since_s < 300.0:
            return
        super().act(action)


def all_of(world: World, kind: type) -> list[object]:
    return [event for _, _, events in world.history for event in events if isinstance(event, kind)]


@pytest.mark.parametrize(("at", "end"), [("pause", RunPhase.PAUSED), ("down", RunPhase.STOPPED)])
def test_a_run_that_reaches_its_cap_stores_and_stops(at: str, end: RunPhase) -> None:
    world = Priced(capped(30.0, at=at), max_steps=10**6, save_steps=10**6)
    world.run(10**5)
    assert world.state.phase is end
    assert "`budget.usd`" in world.state.reason  # by which `status` knows what helps
    assert world.machines == {}
    assert world.checkpoints[-1].step == int(world.steps) > 0
    assert 9.0 < world.spent <= 30.0  # a trainer's end is kept 15 minutes and the way back for
    (reached,) = all_of(world, BudgetReached)
    assert "30.00" in reached.reason  # type: ignore[attr-defined]


def test_it_goes_on_with_a_larger_one_and_stops_again_at_once_with_the_same() -> None:
    world = Priced(capped(30.0), max_steps=10**6)
    world.run(10**5)
    world.resume()
    bought = len(all_of(world, NodeRequested))
    world.run(10**5)
    assert (world.state.phase, len(all_of(world, NodeRequested))) == (RunPhase.PAUSED, bought)
    world.commands.append(Command("1", BUDGET, changes={"usd": 60.0}))
    world.resume()
    while not world.tick():
        world.advance(5.0)
    assert all_of(world, BudgetSet) == [BudgetSet(60.0)]
    assert 30.0 < world.spent <= 60.0


def test_a_cap_an_hour_keeps_the_fleet_small_and_says_so_once() -> None:
    world = Priced(capped(usd_per_h=44.0, max_replicas=4), max_steps=200)
    world.run(10**4)
    assert world.state.phase is RunPhase.FINISHED
    assert len({node.slot for node in all_of(world, NodeRequested)}) == 1 + 2  # type: ignore[attr-defined]
    assert len(all_of(world, BudgetRefused)) == 1


def test_a_cap_that_allows_no_trainer_buys_nothing() -> None:
    for world in (Priced(capped(5.0)), Priced(capped(usd_per_h=20.0))):
        world.run()
        assert (world.state.phase, world.launches) == (RunPhase.PAUSED, [])


@pytest.mark.parametrize(("leaves", "usd_per_h"), [(Role.TRAINER, 44.0), (Role.ROLLOUT, 43.0)])
def test_a_machine_on_its_way_out_makes_room_for_the_next(leaves: Role, usd_per_h: float) -> None:
    """The cap an hour has room for one of each; the old machine is paid for until its cloud has it back."""
    world = SlowToEnd(capped(usd_per_h=usd_per_h, max_replicas=1), max_steps=10**6)
    while world.steps < 5.0:
        world.tick()
        world.advance(5.0)
    name = f"{leaves}-0-i1"
    ended = exit_codes.STOPPED if leaves is Role.TRAINER else None
    world.machines[name] = replace(world.machines[name], notice=True, exit_code=ended)
    while name in world.state.nodes:
        assert world.state.phase is RunPhase.TRAINING
        assert f"{leaves}-0-i2" not in world.state.nodes
        world.tick()
        world.advance(5.0)
    world.tick()
    assert f"{leaves}-0-i2" in world.state.nodes
    assert all_of(world, BudgetReached) == all_of(world, BudgetRefused) == []


def test_a_pause_for_what_was_never_bought_says_so_and_the_run_goes_on_with_it() -> None:
    """A trainer's launch hangs until the budget is reached by what it might have cost, and is then refused."""
    world = SlowToEnd(patient(capped(30.0)), launch_s=10**6, max_steps=20)
    while not all_of(world, BudgetReached):
        world.tick()
        world.advance(60.0)
    assert world.spent > 10.0
    world.machines.clear()
    world.refused.append(LaunchRefused("trainer-0-i1", Refusal.NO_CAPACITY, "nothing to be had"))
    for _ in range(5):
        world.tick()
    assert world.state.phase is RunPhase.PAUSED
    assert world.spent == bill(rentals(world.history, world.now_s)).cost_usd == 0.0
    assert "USD of that were counted for requests that bought nothing: `grpo-orch resume`" in world.state.reason
    world.launch_s = 0.0
    world.resume()
    world.run()
    assert (world.state.phase, len(all_of(world, BudgetReached))) == (RunPhase.FINISHED, 1)


def test_what_may_have_been_bought_stays_spent() -> None:
    """Nobody says that it was refused, or its machine was there once."""
    for came in (False, True):
        launch_s = 0.0 if came else 10**6
        world = Priced(patient(capped(30.0)), launch_s=launch_s, boot_s={Role.TRAINER: 10**6}, max_steps=20)
        while not all_of(world, BudgetReached):
            world.tick()
            world.advance(60.0)
        world.tick()
        if came:
            world.refused.append(LaunchRefused("trainer-0-i1", Refusal.NO_CAPACITY, "its work cannot be started"))
        world.machines.clear()
        for _ in range(5):
            world.tick()
        assert world.state.phase is RunPhase.PAUSED
        assert world.spent > 10.0
        assert "bought nothing" not in world.state.reason


def test_nothing_is_bought_before_prices_are_known() -> None:
    world = Priced(capped(100.0), known=False)
    assert decide(world.state, world.snapshot(), world.spec).events == ()
    world.known = True
    assert decide(world.state, world.snapshot(), world.spec).events != ()


# SkyPilot's `best` on AWS: 1.82 USD an hour for the disk of each machine.
DISKS = {"infra": "aws/us-east-1", "disk_tier": "best"}
ACTS = st.sampled_from(["lose", "notice", "refuse", "away", "daemon", "wait", "wait", "wait", "fast"])


def test_disks_are_kept_the_money_for_before_a_launch() -> None:
    """A trainer of 40 USD an hour needs 16.67 to be stopped and returned; with its disk 0.76 more."""
    for run, bought in ((capped(17.0), True), (with_disks(capped(17.0)), False), (with_disks(capped(17.5)), True)):
        world = Priced(run)
        world.tick()
        assert bool(all_of(world, NodeRequested)) is bought


IN_GCP = Pool("gcp", "us-central1", "us-central1-a", "a3-highgpu-8g", "H100:8", Market.SPOT)


class Landed(Priced):
    """Its cloud tells where its machines are."""

    def snapshot(self) -> Snapshot:
        looked = super().snapshot()
        machines = {name: replace(one, pool=IN_GCP) for name, one in (looked.machines or {}).items()}
        return replace(looked, machines=machines)


def test_once_its_place_is_known_a_machines_disk_counts_as_the_one_there() -> None:
    disk_anywhere = {"any_of": [DISKS, {"infra": "gcp", "disk_tier": "low"}]}
    run = with_disks(capped(10**4))
    sections = replace(run.trainer, resources=disk_anywhere), replace(run.rollout, resources=disk_anywhere)
    world = Landed(replace(run, trainer=sections[0], rollout=sections[1]), max_steps=10**6, launch_s=600.0)
    world.tick()
    (asked,) = all_of(world, NodeRequested)
    assert asked.disk_usd_per_h == pytest.approx(1332.0 / 730)  # type: ignore[attr-defined]
    for _ in range(400):
        world.advance(10.0)
        world.tick()
    there = 10.24 / 730
    assert [node.disk_usd_per_h for node in world.state.nodes.values()] == pytest.approx([there] * 3)
    hours = sum(one.hours for one in rentals(world.history, world.now_s))
    assert spent_over_time(world.history, world.now_s)[-1].disks_usd == pytest.approx(hours * there)
    assert bill(rentals(world.history, world.now_s)).cost_usd == pytest.approx(world.spent)


@settings(max_examples=50)
@given(
    st.floats(8.0, 80.0),
    st.lists(st.tuples(ACTS, st.integers(0, 9), st.floats(1.0, 240.0)), max_size=25),
    st.floats(0.0, 880.0),
    st.booleans(),
)
def test_the_cap_is_never_passed(
    usd: float, acts: list[tuple[str, int, float]], storing_s: float, disks: bool
) -> None:
    """Losses with and without notice, no capacity, a cloud that does not answer for minutes, new daemons."""
    run = capped(usd, max_replicas=3)
    world = Priced(with_disks(run) if disks else run, max_steps=10**6, storing_s=storing_s)
    for act, which, passes_s in acts:
        world.away = False
        world.tick()
        names = sorted(world.machines)
        match act:
            case "lose" if names:
                world.lose(names[which % len(names)])
            case "notice" if names:
                name = names[which % len(names)]
                world.machines[name] = replace(world.machines[name], notice=True)
            case "refuse":
                world.refusing = not world.refusing
            case "away":
                world.away = True
            case "daemon":
                world.take_over()
        for _ in range(5):
            world.advance(passes_s / 5)
            world.tick()
            assert world.spent <= usd
    world.away = world.refusing = False
    for _ in range(5000):
        if world.tick():
            break
        world.advance(20.0)
        assert world.spent <= usd
    assert world.machines == {}
    assert world.state.phase is RunPhase.PAUSED
    reported = bill(rentals(world.history, world.now_s))
    over_time = spent_over_time(world.history, world.now_s)
    assert (over_time[-1].usd if over_time else 0.0) == pytest.approx(world.spent)
    assert not disks or not over_time or over_time[-1].disks_usd > 0
    assert reported.cost_usd == pytest.approx(world.spent)
    assert reported.cost_all_on_demand_usd == pytest.approx(on_demand_usd(world.state, world.now_s))


POLICY_BYTES, POLICY_GB = 65.6e9, 65.6  # of 32 billion parameters
PUBLISHED_EVERY_S = 300.0
SENT_USD_PER_GB, FETCHED_USD_PER_GB = 0.09, 0.12  # from AWS to Google's store, and back


class Publishing(Priced):
    """Its store is in another cloud: each policy is sent there, and fetched from there by every node; so is the
    checkpoint with which it stops, six times as large. Its size is known, as from the first policy on. What that
    costs is reckoned here, apart from the run."""

    store_usd = 0.0
    rows: list[float]
    joined: set[str]

    def snapshot(self) -> Snapshot:
        new = [time_s for time_s in self.rows if time_s > self.state.store_until_s]
        size = POLICY_BYTES * len(new)
        until_s = max(new, default=0.0)
        stored = Stored(len(new), 0, size, POLICY_BYTES, until_s)
        return replace(super().snapshot(), store_place=Place("gcp", "us-east4"), stored=stored)

    def advance(self, dt_s: float = 1.0) -> None:
        published, kept = int(self.steps / PUBLISHED_EVERY_S), len(self.checkpoints)
        super().advance(dt_s)
        if int(self.steps / PUBLISHED_EVERY_S) > published:
            self.rows.append(self.now_s)
            self.store_usd += POLICY_GB * (SENT_USD_PER_GB + FETCHED_USD_PER_GB * len(self.up(Role.ROLLOUT)))
        for node in self.state.nodes.values():
            if node.served and node.id not in self.joined:
                self.joined.add(node.id)
                size_gb = POLICY_GB * (6 if node.role is Role.TRAINER else 1)
                self.store_usd += FETCHED_USD_PER_GB * size_gb
        self.store_usd += SENT_USD_PER_GB * 6 * POLICY_GB * (len(self.checkpoints) - kept)

    @property
    def spent(self) -> float:
        """Machines by the state's own reckoning, and the store by what it took."""
        return super().spent - self.state.store_usd + self.store_usd


@settings(max_examples=30)
@given(st.floats(90.0, 400.0), st.lists(st.tuples(ACTS, st.floats(1.0, 240.0)), max_size=25))
def test_the_cap_is_never_passed_where_each_policy_crosses_clouds(
    usd: float, acts: list[tuple[str, float]]
) -> None:
    run = with_disks(capped(usd, max_replicas=3))
    world = Publishing(run, max_steps=10**6, save_steps=10**6, storing_s=600.0)
    world.rows, world.joined = [], set()
    for act, passes_s in acts:
        world.tick()
        if act == "daemon":
            world.take_over()
        elif act == "lose" and (names := sorted(world.machines)):
            world.lose(names[-1])
        for _ in range(5):
            world.advance(passes_s / 5)
            world.tick()
            assert world.spent <= usd
    for _ in range(5000):
        if world.tick():
            break
        world.advance(20.0)
        assert world.spent <= usd
    assert world.state.phase is RunPhase.PAUSED
    told = sum(event.usd for event in all_of(world, StoreCharged))  # type: ignore[attr-defined]
    assert world.state.store_usd == pytest.approx(told)
    assert world.state.store_usd >= world.store_usd * (1 - 1e-9)
    if over_time := spent_over_time(world.history, world.now_s):
        assert over_time[-1].store_usd == pytest.approx(told)


@pytest.mark.parametrize(("behind_s", "counted_s"), [(0.0, 2000.0), (600.0, 1400.0)])
def test_what_the_store_has_cost_outlives_the_controller_that_counted_it(
    behind_s: float, counted_s: float
) -> None:
    """Half an hour after it was last journalled another one takes over, on a host whose clock may be behind."""
    world = Priced(capped(10**4), max_steps=10**6)
    world.journal((StoreCharged(0.1, 1, 1, 1, 0.0),))
    world.now_s += 1800.0
    world.journal((BudgetSet(10**4),))
    world.now_s += 200.0 - behind_s
    world.take_over()
    assert world.now_s - world.state.store_charged_at_s == max(1800.0, counted_s)


def test_nobody_asks_the_store_for_a_run_that_is_over_nor_for_longer_than_an_hour() -> None:
    for ends in (True, False):
        world = Priced(capped(5.0) if ends else capped(100.0), max_steps=10**6)
        for _ in range(5):
            world.tick()
            world.advance(5.0)
        assert (world.state.phase is RunPhase.PAUSED) is ends
        world.now_s += 30 * 86400.0
        world.take_over()
        assert world.now_s - world.state.store_charged_at_s == (0.0 if ends else 3600.0)


def test_a_clock_that_is_behind_forgets_no_dollar() -> None:
    """A daemon on another host goes on, whose clock is two hours behind that of the one before it."""
    world = Priced(capped(10**4), max_steps=10**6)
    for _ in range(360):
        world.tick()
        world.advance(10.0)
    world.lose("rollout-0-i1")  # of which the journal tells at the end of the hour
    world.tick()
    before = world.spent
    assert before == pytest.approx(36.0 + 2 * 3.6, rel=0.02)
    world.now_s -= 7200.0
    world.take_over()
    assert world.spent == pytest.approx(before)
    assert bill(rentals(world.history, world.now_s)).cost_usd == pytest.approx(before)


def test_the_diary_has_the_numbers_of_each_purchase_and_return() -> None:
    world = Priced(capped(30.0), max_steps=10**6)
    world.run(10**5)
    asked = {event.node: event for event in all_of(world, NodeRequested)}  # type: ignore[attr-defined]
    assert asked["trainer-0-i1"].reason == "first; 0.00 of 30.00 USD spent"  # type: ignore[attr-defined]
    assert asked["rollout-1-i1"].reason.startswith("first; 2 of 2 rollout nodes; ")  # type: ignore[attr-defined]
    assert asked["rollout-1-i1"].most_usd_per_h == 4.0  # type: ignore[attr-defined]
    gone = [event.reason for event in all_of(world, NodeMoved) if event.phase is NodePhase.GONE]  # type: ignore[attr-defined]
    assert len(gone) == 3
    assert all(reason.startswith("taken down, after ") and reason.endswith(" USD") for reason in gone)
