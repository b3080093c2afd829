"""A machine ends by itself once the run is silent, and not before."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest

from checkpoint.store import layout
from checkpoint.store.errors import StoreUnavailable
from checkpoint.store.run_store import Store
from policies.model.node_contract import DEAD_MAN_ENV
from tasks.machine.dead_man import LOOKS, UNREADABLE_S, DeadManSwitch, start
from tests.budget import HANG_S

MEMBERS = layout.members((0, 1, 1))
LIMIT_S = 1800.0
LOOK_S = LIMIT_S / LOOKS
names = itertools.count()


class Away(Store):
    """A store that can be away."""

    away = False

    def get(self, key: str) -> bytes:
        if self.away:
            raise StoreUnavailable(f"read {key}: 503")
        return super().get(key)


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
    start(store, {DEAD_MAN_ENV: "0"}, ended.clear)
    start(store, {}, ended.clear)
    assert not any(thread.name == "dead-man" and thread.is_alive() for thread in threading.enumerate())
