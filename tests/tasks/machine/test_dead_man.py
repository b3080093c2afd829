"""A machine ends by itself once the run is silent, and not before."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Entry, Store
from grpo_orch.policies.model.node_contract import DEAD_MAN_ENV
from grpo_orch.tasks.machine.dead_man import CHECKS, UNREADABLE_S, DeadManSwitch, start
from tests.budget import HANG_S, until

MEMBERS = layout.members((0, 1, 1))
LIMIT_S = 1800.0
LOOK_S = LIMIT_S / CHECKS
names = itertools.count()


class Away(Store):
    """A store that can be away, and counts what is asked of it."""

    away = False
    gets = listings = 0

    def get(self, key: str) -> bytes:
        if self.away:
            raise StoreUnavailable(f"read {key}: 503")
        self.gets += 1
        return super().get(key)

    def entries(self, prefix: str, *, after: str | None = None) -> list[Entry]:
        self.listings += 1
        return super().entries(prefix, after=after)


class Watched:
    """A switch on a clock of the test's, and who writes."""

    def __init__(self) -> None:
        self.store = Away(f"memory://dead-man-{next(names)}", retry_s=0.0)
        self.now_s = 0.0
        self.switch = DeadManSwitch(self.store, LIMIT_S, lambda: self.now_s)
        self.store.put(layout.gateway((0, 1, 1)), b"{}")
        self.words = itertools.count()

    def lasts_s(self, *writers: str, most_s: float, each: Callable[[], None] = lambda: None) -> float | None:
        """Seconds until it is due, while `writers` write; None: never within `most_s`."""
        began_s = self.now_s
        while self.now_s - began_s < most_s:
            self.now_s += LOOK_S
            for key in writers:
                self.store.put(key, str(next(self.words)).encode())
            each()
            if self.switch.is_due():
                return self.now_s - began_s
        return None


@pytest.mark.parametrize("writer", [layout.LEASE, MEMBERS])
def test_while_either_writes_nothing_ends_and_once_both_are_silent_it_does(writer: str) -> None:
    watched = Watched()
    assert watched.lasts_s(writer, most_s=10 * LIMIT_S) is None
    silent_s = watched.lasts_s(most_s=10 * LIMIT_S)
    assert silent_s is not None
    assert LIMIT_S < silent_s <= LIMIT_S + 2 * LOOK_S


@pytest.mark.parametrize(("writer", "most"), [(layout.LEASE, 1.1), (MEMBERS, 2.1)])
def test_who_is_heard_is_all_that_is_asked_for(writer: str, most: float) -> None:
    watched = Watched()
    watched.lasts_s(writer, most_s=3 * LOOK_S)
    watched.store.gets = watched.store.listings = 0
    assert watched.lasts_s(writer, most_s=10 * LIMIT_S) is None
    assert watched.store.gets / (10 * CHECKS) < most
    assert watched.store.listings == 0


def test_a_gateway_that_comes_is_heard_while_nobody_steers() -> None:
    watched = Watched()
    assert watched.lasts_s(MEMBERS, most_s=LIMIT_S) is None
    watched.store.put(layout.gateway((0, 2, 1)), b"{}")
    assert watched.lasts_s(layout.members((0, 2, 1)), most_s=10 * LIMIT_S) is None


def test_a_store_that_is_away_is_no_silence_for_a_day() -> None:
    watched = Watched()
    watched.lasts_s(layout.LEASE, most_s=LOOK_S)
    watched.store.away = True
    assert watched.lasts_s(most_s=UNREADABLE_S - LOOK_S) is None
    watched.store.away = False
    assert watched.lasts_s(most_s=LIMIT_S - LOOK_S) is None
    watched.store.away = True
    assert watched.lasts_s(most_s=2 * UNREADABLE_S) is not None


def test_an_hour_in_which_this_machine_slept_is_no_silence() -> None:
    watched = Watched()
    watched.lasts_s(layout.LEASE, most_s=LOOK_S)
    watched.now_s += 10 * LIMIT_S
    assert not watched.switch.is_due()
    assert watched.lasts_s(most_s=LIMIT_S / 2) is None


def test_it_is_called_once_in_a_run_that_was_never_heard_and_never_where_it_is_off() -> None:
    store, ended = Store(f"memory://dead-man-{next(names)}"), threading.Event()
    start(store, {DEAD_MAN_ENV: "0.05"}, ended.set)
    assert ended.wait(HANG_S)
    until("the end of its thread, which has only said so", lambda: not watching())
    start(store, {DEAD_MAN_ENV: "0"}, ended.clear)
    start(store, {}, ended.clear)
    assert not watching()


def watching() -> bool:
    return any(thread.name == "dead-man" for thread in threading.enumerate())
