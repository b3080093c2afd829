"""State that a trainer process has before it builds its trainer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.tasks.machine.leaving import Leaving
from grpo_orch.tasks.machine.node_env import NodeEnv
from grpo_orch.tasks.storing.heartbeat import Heartbeat
from grpo_orch.tasks.storing.restoring import Restored
from grpo_orch.tasks.storing.step_costs import StepCosts
from grpo_orch.tasks.trainer.time_limit import kill_after


@dataclass(frozen=True, slots=True)
class Start:
    """Inputs for building a trainer. The record's specification is this timeline's."""

    env: NodeEnv
    record: RunRecord
    store: Store
    heartbeat: Heartbeat
    leaving: Leaving
    restored: Restored | None
    fetched_model: Path | None  # the base model, if this machine fetched it
    costs: StepCosts

    @property
    def spec(self) -> RunSpec:
        return self.record.spec

    @property
    def workdir(self) -> Path:
        """Return the folder of run.yaml, to which its paths are relative."""
        return Path(self.spec.workdir)

    def check_stop(self) -> None:
        """Raise Fenced or LeaveNow if the trainer must exit."""
        self.heartbeat.check()
        self.leaving.check()

    def limited(self, key: str) -> AbstractContextManager[None]:
        """Limit the user code that run.yaml names under `key` to `policies.boot_timeout_s`."""
        limit_s = self.spec.policies.boot_timeout_s
        why = f"{key} did not return within {limit_s:g} s (policies.boot_timeout_s)"
        return kill_after(limit_s, Path(self.env.workdir), why, key)

    @property
    def base_model(self) -> Path | None:
        restored = None if self.restored is None else self.restored.base_model
        return restored or self.fetched_model
