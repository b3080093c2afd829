"""Whether, when and with what a trainer leaves its machine: at SIGTERM, at a preemption notice, at `down`.

Two files in the machine's working folder say that it is to. `notice` is written by whoever hears it from the
cloud, and holds for how long the machine will still be there; `stop-ATTEMPT` by the machine's supervisor at
SIGTERM, and by the heartbeat when the run is asked to stop. All processes of a trainer leave together; the first
one decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from pathlib import Path

import structlog

from checkpoint.records import documents
from checkpoint.store.run_store import Store
from policies.control.leaving import NOTICE_S, is_worth_storing, leave_by_s
from policies.model.node_contract import NOTICE
from tasks.machine.node_env import NodeEnv

log = structlog.get_logger()

LOOK_S = 0.5
SILENT_S = 10.0
WAIT_S = 300.0  # twice as long as any notice, and more
DOWN = "down"  # in `stop-ATTEMPT`: the run is asked to stop, and its machine stays for as long as this takes


def stop_file(workdir: Path, attempt: int) -> Path:
    """Is there once that attempt of the trainer is to end as soon as it can."""
    return workdir / f"stop-{attempt}"


class LeaveNow(Exception):
    """The trainer is to save the end of the last step that it has taken, and to end."""


class Leaving:
    """What one trainer knows of its end, and what it has measured of a checkpoint and of its steps.

    Args:
        workdir: the machine's working folder.
        attempt: of this trainer.
        clock: seconds, never going back.
    """

    def __init__(self, workdir: Path, attempt: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._notice_file, self._stop_file = workdir / NOTICE, stop_file(workdir, attempt)
        self._clock = clock
        self._notice: tuple[float, float] | None = None  # when it came and how long it lasts
        self._said = False
        self._step_s = 0.0
        self._boundary_at_s = clock()
        self._generated_s = 0.0
        self._again_s = 0.0
        self._save_s: float | None = None
        self._store_s: Callable[[], float | None] = lambda: None

    def ask(self) -> None:
        """The run is to stop."""
        if not self._stop_file.exists():
            self._stop_file.write_text(DOWN)

    @property
    def asked(self) -> bool:
        """Whether the trainer is to end as soon as it can."""
        return self._stop_file.exists()

    @property
    def told(self) -> bool:
        """Whether the trainer is to end, at once or when a notice is over."""
        return self.asked or self._noticed() is not None

    def begin(self, store_s: Callable[[], float | None]) -> None:
        """Training begins; `store_s` returns what storing the last checkpoint has taken, None before the first."""
        self._boundary_at_s, self._store_s = self._clock(), store_s

    def step_ended(self, generated_s: float) -> None:
        """A step has ended; `generated_s` is what generating has taken since the trainer began."""
        now_s = self._clock()
        self._step_s, self._boundary_at_s = now_s - self._boundary_at_s, now_s
        self._again_s += max(0.0, self._step_s - (generated_s - self._generated_s))
        self._generated_s = generated_s

    def saved(self, took_s: float) -> None:
        """A checkpoint is on its way to the store: what came before it will not be made again."""
        self._save_s, self._again_s = took_s, 0.0

    def is_due(self, *, in_step: bool) -> bool:
        """Whether to leave now; between two steps also where the next one would not end in time."""
        if self.asked:
            return self._say("asked to end")
        notice = self._noticed()
        if notice is None:
            return False
        leave_at_s = leave_by_s(*notice, self._closing_s)
        if leave_at_s is None:
            self._say("a checkpoint takes longer than the notice lasts; training goes on")
            return False
        ahead_s = 0.0 if in_step else self._step_s
        return self._clock() + ahead_s >= leave_at_s and self._say("its machine will be taken")

    def check(self) -> None:
        """Raise LeaveNow in the middle of a step, if it is due."""
        if self.is_due(in_step=True):
            raise LeaveNow

    def is_worth_storing(self) -> bool:
        """Whether what was trained since the newest checkpoint is to be stored."""
        machine_stays = self.asked and self._stop_file.read_text() == DOWN and self._noticed() is None
        worth = is_worth_storing(self._again_s, self._closing_s, machine_stays=machine_stays)
        if not worth:
            log.info("not_saved", again_s=round(self._again_s, 3), saving_and_storing_s=self._closing_s)
        return worth

    @property
    def _closing_s(self) -> float | None:
        store_s = self._store_s()
        return None if self._save_s is None or store_s is None else self._save_s + store_s

    def _noticed(self) -> tuple[float, float] | None:
        """When the notice came and how long it lasts; None where there is none, or nothing followed it."""
        if self._notice is None and self._notice_file.exists():
            lasts_s = float(self._notice_file.read_text() or NOTICE_S)
            age_s = max(0.0, time.time() - self._notice_file.stat().st_mtime)
            if age_s < lasts_s:
                self._notice = self._clock() - age_s, lasts_s
        return self._notice

    def _say(self, why: str) -> bool:
        if not self._said:
            self._said = True
            log.warning("leaving", why=why, saving_and_storing_s=self._closing_s, step_s=round(self._step_s, 3))
        return True


def await_predecessor(store: Store, env: NodeEnv, last_words: Container[str], silent_s: float = SILENT_S) -> None:
    """Wait while the trainer of the machine before stores what it has: from there this one goes on.

    Not once it is silent, for then its machine is gone; nor after a notice that nothing follows.

    Args:
        last_words: activities of a trainer that has ended.
        silent_s: five beats by default.
    """
    said, since_s = documents.TRAINER.read(store), time.monotonic()
    until_s = since_s + WAIT_S
    while said is not None and said.leaving and said.activity not in last_words:
        older = said.timeline == env.timeline and said.node != env.node and said.precedence < env.precedence
        now_s = time.monotonic()
        if not older or now_s - since_s > silent_s or now_s > until_s:
            return
        time.sleep(LOOK_S)
        if (now := documents.TRAINER.read(store)) != said:
            said, since_s = now, time.monotonic()
