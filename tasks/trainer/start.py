"""What a trainer's process has before its trainer is made."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from checkpoint.records.documents import RunRecord
from checkpoint.store.run_store import Store
from policies.model.spec import RunSpec
from tasks.machine.leaving import Leaving
from tasks.machine.node_env import NodeEnv
from tasks.storing.heartbeat import Heartbeat
from tasks.storing.restoring import Restored
from tasks.storing.step_costs import StepCosts
from tasks.trainer.overdue import ended_after


@dataclass(frozen=True, slots=True)
class Start:
    """The record's specification is this timeline's."""

    env: NodeEnv
    record: RunRecord
    store: Store
    heartbeat: Heartbeat
    leaving: Leaving
    restored: Restored | None
    brought: Path | None  # the base model, if it came from the store
    costs: StepCosts

    @property
    def spec(self) -> RunSpec:
        return self.record.spec

    @property
    def workdir(self) -> Path:
        """The folder of run.yaml, to which its paths are relative."""
        return Path(self.spec.workdir)

    def may_go_on(self) -> None:
        """Raise Fenced or LeaveNow if the trainer is to end."""
        self.heartbeat.check()
        self.leaving.check()

    def limited(self, key: str) -> AbstractContextManager[None]:
        """Within, code that run.yaml names under `key` may take as long as a machine may before its first work."""
        limit_s = self.spec.policies.boot_timeout_s
        why = f"{key} did not return within {limit_s:g} s (policies.boot_timeout_s)"
        return ended_after(limit_s, Path(self.env.workdir), why, key)

    @property
    def base_model(self) -> Path | None:
        restored = None if self.restored is None else self.restored.base_model
        return restored or self.brought
