"""Decide when a trainer leaves its machine, and whether it saves first: at SIGTERM, a preemption notice or `down`.

Two files in the machine's working folder request this. `notice` contains the seconds until the machine is taken;
the process that receives the cloud's notice writes it. `stop-ATTEMPT` is written by the machine's supervisor at
SIGTERM, and by the heartbeat when the run is stopped. All processes of a trainer leave together; the first process
decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from pathlib import Path

import structlog

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.control.leaving import NOTICE_S, is_worth_storing, leave_by_s
from grpo_orch.policies.model.node_contract import NOTICE
from grpo_orch.tasks.machine.node_env import NodeEnv

log = structlog.get_logger()

POLL_S = 0.5
SILENT_S = 10.0
WAIT_S = 300.0  # more than twice as long as any notice
DOWN = "down"  # in `stop-ATTEMPT`: the run is stopped, and its machine stays until the trainer has ended


def stop_file(workdir: Path, attempt: int) -> Path:
    """Return the file that exists once an attempt of the trainer must end as soon as possible."""
    return workdir / f"stop-{attempt}"


class LeaveNow(Exception):
    """The trainer must save the state after its last complete step, and end."""


class Leaving:
    """Tracks requests to leave, and the measured duration of steps and checkpoints.

    Args:
        workdir: the machine's working folder.
        attempt: of this trainer.
        clock: monotonic seconds.
    """

    def __init__(self, workdir: Path, attempt: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._notice_file, self._stop_file = workdir / NOTICE, stop_file(workdir, attempt)
        self._clock = clock
        self._notice: tuple[float, float] | None = None  # when it arrived and how long it lasts
        self._is_logged = False
        self._step_s = 0.0
        self._boundary_at_s = clock()
        self._generated_s = 0.0
        self._unsaved_s = 0.0  # training time since the newest checkpoint
        self._save_s: float | None = None
        self._store_s: Callable[[], float | None] = lambda: None

    def request_stop(self) -> None:
        """Request the trainer's end because the run is stopped."""
        if not self._stop_file.exists():
            self._stop_file.write_text(DOWN)

    @property
    def is_stop_requested(self) -> bool:
        """Whether the trainer must end as soon as possible."""
        return self._stop_file.exists()

    @property
    def is_leaving(self) -> bool:
        """Whether the trainer must end, immediately or before a notice expires."""
        return self.is_stop_requested or self._active_notice() is not None

    def begin(self, store_s: Callable[[], float | None]) -> None:
        """Start the first step.

        Args:
            store_s: returns how long storing the last checkpoint took; None before the first.
        """
        self._boundary_at_s, self._store_s = self._clock(), store_s

    def step_ended(self, generated_s: float) -> None:
        """Record the end of a step. `generated_s` is the time for generation since the trainer started."""
        now_s = self._clock()
        self._step_s, self._boundary_at_s = now_s - self._boundary_at_s, now_s
        self._unsaved_s += max(0.0, self._step_s - (generated_s - self._generated_s))
        self._generated_s = generated_s

    def saved(self, took_s: float) -> None:
        """Record a saved checkpoint; earlier training need not be repeated."""
        self._save_s, self._unsaved_s = took_s, 0.0

    def is_due(self, *, in_step: bool) -> bool:
        """Return whether to leave now. Between two steps, also if the next step would not end in time."""
        if self.is_stop_requested:
            return self._log_once("stop requested")
        notice = self._active_notice()
        if notice is None:
            return False
        leave_at_s = leave_by_s(*notice, self._closing_s)
        if leave_at_s is None:
            self._log_once("a checkpoint takes longer than the preemption notice lasts; training continues")
            return False
        ahead_s = 0.0 if in_step else self._step_s
        return self._clock() + ahead_s >= leave_at_s and self._log_once("preemption notice")

    def check(self) -> None:
        """Raise LeaveNow in the middle of a step if leaving is due."""
        if self.is_due(in_step=True):
            raise LeaveNow

    def is_worth_storing(self) -> bool:
        """Return whether to store what was trained since the newest checkpoint."""
        is_down = self.is_stop_requested and self._stop_file.read_text() == DOWN
        machine_stays = is_down and self._active_notice() is None
        is_worth = is_worth_storing(self._unsaved_s, self._closing_s, machine_stays=machine_stays)
        if not is_worth:
            log.info("not_saved", unsaved_s=round(self._unsaved_s, 3), saving_and_storing_s=self._closing_s)
        return is_worth

    @property
    def _closing_s(self) -> float | None:
        """How long saving and storing a checkpoint takes, if known."""
        store_s = self._store_s()
        return None if self._save_s is None or store_s is None else self._save_s + store_s

    def _active_notice(self) -> tuple[float, float] | None:
        """Return when the notice arrived and how long it lasts; None without one, or if it had already expired."""
        if self._notice is None and self._notice_file.exists():
            lasts_s = float(self._notice_file.read_text() or NOTICE_S)
            age_s = max(0.0, time.time() - self._notice_file.stat().st_mtime)
            if age_s < lasts_s:
                self._notice = self._clock() - age_s, lasts_s
        return self._notice

    def _log_once(self, why: str) -> bool:
        if not self._is_logged:
            self._is_logged = True
            log.warning("leaving", reason=why, saving_and_storing_s=self._closing_s, step_s=round(self._step_s, 3))
        return True


def await_predecessor(store: Store, env: NodeEnv, final: Container[str], silent_s: float = SILENT_S) -> None:
    """Wait while the leaving trainer of the previous machine stores its state, from which this trainer continues.

    Stops waiting after WAIT_S, and once the heartbeat is silent, since then that machine is gone.

    Args:
        final: activities of a trainer that has ended.
        silent_s: five beats by default.
    """
    beat, since_s = documents.TRAINER.read(store), time.monotonic()
    until_s = since_s + WAIT_S
    while beat is not None and beat.leaving and beat.activity not in final:
        is_older = beat.node != env.node and beat.timeline == env.timeline and beat.precedence < env.precedence
        now_s = time.monotonic()
        if not is_older or now_s - since_s > silent_s or now_s > until_s:
            return
        time.sleep(POLL_S)
        if (newest := documents.TRAINER.read(store)) != beat:
            beat, since_s = newest, time.monotonic()
