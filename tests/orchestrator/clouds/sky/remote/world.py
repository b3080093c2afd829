"""A run whose daemon lives on a machine that SkyPilot provisions, and the user who has it.

SkyPilot is a table, twice: the user's, and the controller machine's own, of which the user's knows nothing. The
daemon is a real one, in a thread that stands for that machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from checkpoint import journal
from checkpoint.records import documents
from checkpoint.records.documents import RunRecord
from checkpoint.store.run_store import Store
from orchestrator.clouds.sky.records import CloudCheck, Cluster
from orchestrator.clouds.sky.work import Work
from orchestrator.control import daemon
from policies.model.events import TookOver
from policies.model.state import RunState
from tests.budget import HANG_S
from tests.stand_ins.sky_table import Table

RUN_ID = "sim-0"
CLUSTER = f"grpo-controller-{RUN_ID}"


class Users(Table):
    """The user's SkyPilot, and beyond it the controller machine with a SkyPilot of its own."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.beyond = Table()
        self.set_by_user: dict[str, Any] = {}
        self.reasons: list[str] = []
        self.noted: list[documents.ControllerMachine | None] = []  # in the store, as each launch began
        self._store = store
        self._stop = threading.Event()
        self._daemon: threading.Thread | None = None

    def launch(self, name: str, work: Work, timeout_s: float) -> Cluster:
        documents.read_run(self._store)  # raises: the run comes first
        self.noted.append(documents.CONTROLLER.read(self._store))
        launched = super().launch(name, work, timeout_s)
        if self.is_idle(name, timeout_s):
            self.reasons.append(work.env["GRPO_ORCH_REASON"])
            self._stop = threading.Event()
            steer = (self._store, self.reasons[-1], self._stop)
            self._daemon = threading.Thread(target=daemon.steer, args=steer, daemon=True)
            self._daemon.start()
        return launched

    def is_idle(self, _name: str, _: float) -> bool:
        return self.idle or self._daemon is None or not self._daemon.is_alive()

    def settings(self) -> dict[str, Any]:
        return self.set_by_user

    def log(self, name: str, *, follow: bool) -> Iterator[str]:
        if name not in self.table:
            raise KeyError(name)
        return iter([f"the daemon says{' and goes on' if follow else ''}"])

    def clouds(self) -> list[CloudCheck]:
        return [CloudCheck("aws", True, ""), CloudCheck("gcp", False, "no keys"), CloudCheck("lambda", True, "")]

    def daemon_dies(self) -> None:
        """It leaves its machines as they are."""
        self._stop.set()
        if self._daemon is not None:
            self._daemon.join(HANG_S)


@dataclass
class World:
    """A run's store in a folder, and the user who has it."""

    store: Store
    sky: Users
    record: RunRecord

    @property
    def state(self) -> RunState:
        return journal.recover(self.store).state

    def until(self, wanted: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + HANG_S
        while not wanted():
            assert time.monotonic() < deadline_s, self.state
            time.sleep(0.01)

    def taken_for(self) -> list[str]:
        """Why the run was taken over, each time."""
        events = [event for entry in journal.read(self.store) for event in entry.decoded()]
        return [event.reason for event in events if isinstance(event, TookOver)]
