"""How fast the run's journal is: appends, and taking up a run of many entries.

The long journals are a busy run's: the real `decide` against the simulated world of the tests, with a fleet that
loses machines all the time. They are stored in bulk, in the form in which a controller leaves them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.journal import SCHEMA, Journal, Record, advance, recover
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import event_to_plain, to_json
from grpo_orch.checkpoint.store.run_store import Entry, Store
from grpo_orch.policies.model.events import ControllerTookOver, GatewayRestarted
from grpo_orch.policies.model.state import RunState
from tests.stand_ins.world import World, spec

WRITERS = 8
BATCH = 4096  # entries that wait for a store at once
LOSS_RATE = 0.02  # of a machine at work in a tick of half a second: each works for some 25 s
SAVE_STEPS = 10  # rare enough to cost little: no entry of the journal tells of a checkpoint


@dataclass(frozen=True, slots=True)
class Recovery:
    """Taking up a run of `entries` journal entries. `objects` counts objects read; listings are apart."""

    entries: int
    seconds: float
    objects: int
    listings: int


def appends_per_s(store: Store, count: int) -> float:
    """Append `count` entries to an empty journal, one after another. Return entries a second."""
    journal = Journal(store, "benchmark/1")
    journal.take_over(0.0, "benchmark", 1, "up")
    begun_s = time.perf_counter()
    for number in range(count):
        journal.append(float(number), (GatewayRestarted(f"{number:016x}"),))
    return count / (time.perf_counter() - begun_s)


def recovery(store: Store, entries: int) -> Recovery:
    """Make the journal in an empty store `entries` long, and take it up. Raises StoreError."""
    state = write_journal(store, entries)
    counted = Counted(store)
    begun_s = time.perf_counter()
    found = recover(counted)
    seconds = time.perf_counter() - begun_s
    if (found.number, found.state) != (entries, state):
        raise RuntimeError(f"{store.url}: what was recovered is not what was written")
    return Recovery(entries, seconds, len(counted.objects), len(counted.listings))


def write_journal(store: Store, entries: int) -> RunState:
    """Store a busy run's journal with its segments and return the state after the last entry."""
    state, since = RunState(), list[Record]()
    with ThreadPoolExecutor(WRITERS) as pool:
        batch = list[Record]()
        for record in busy_run(entries):
            batch.append(record)
            if len(batch) == BATCH or record.number == entries:
                list(pool.map(lambda one: store.create(layout.journal_entry(one.number), to_json(one)), batch))
                batch = []
            since.append(record)
            if len(since) == journal.SEGMENT_ENTRIES:
                state = advance(state, since)
                journal.write_segment(store, since, state)
                since = []
    return advance(state, since)


def busy_run(entries: int, seed: int = 1) -> Iterator[Record]:
    """Yield the first `entries` journal entries of a run whose machines and work die all the time."""
    world = BusyWorld(spec(max_replicas=8), max_steps=10**9, save_steps=SAVE_STEPS)
    rng = random.Random(seed)
    number = epoch = 0
    while True:
        for _, time_s, events in world.history[number:]:
            number += 1
            epoch = number if isinstance(events[0], ControllerTookOver) else epoch
            plain = [event_to_plain(event) for event in events]
            yield Record(SCHEMA, number, epoch, "host/4711", f"{rng.getrandbits(64):016x}", time_s, plain)
            if number == entries:
                return
        world.tick()
        world.advance()
        for node in world.at_work():
            if rng.random() < LOSS_RATE:
                # At its second end it is lost: no more machines are bought where too many broke for good.
                for_good = world.machines[node].attempt > 1 or rng.random() < 0.7
                world.lose(node) if for_good else world.exit(node, 1)
        if rng.random() < LOSS_RATE / 10:
            world.take_over()


@dataclass
class BusyWorld(World):
    """The tests' world, and which of its machines may be taken."""

    def at_work(self) -> list[str]:
        """The machines that serve. Others are left alone: no more are bought where too many never served."""
        return [node for node, machine in self.machines.items() if self._works(machine)]


class Counted(Store):
    """Another Store's objects to read, with the requests noted; lists, since several threads read."""

    def __init__(self, store: Store) -> None:
        self.url = store.url
        self._store = store
        self.objects: list[str] = []
        self.listings: list[str] = []

    def get(self, key: str) -> bytes:
        self.objects.append(key)
        return self._store.get(key)

    def entries(self, prefix: str, *, after: str | None = None) -> list[Entry]:
        self.listings.append(prefix)
        return self._store.entries(prefix, after=after)
