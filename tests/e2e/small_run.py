"""A run with a real daemon and real machines, whose work is a stand-in that only sleeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_orch.policies.model.vocabulary import NodePhase
from tests.e2e.harness import Run
from tests.rigs.store.server import S3Server
from tests.stand_ins.earlier_trainer import leave_heartbeat

STAND_IN = Path(__file__).parents[1] / "stand_ins" / "stand_in_node.sh"


class SmallRun(Run):
    """A run whose machines only sleep."""

    def __init__(self, folder: Path, server: S3Server | None = None, **changes: Any) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "rewards.py").write_text(
            "def one(completions, **kwargs):\n    return [1.0] * len(completions)\n"
        )
        spec: dict[str, Any] = {
            "name": "control",
            "trainer": {"model": "some/model", "dataset": "some/data", "reward_funcs": ["rewards.one"]},
            "grpo": {"max_steps": 10, "per_device_train_batch_size": 8, "num_generations": 8},
            "rollout": {"replicas": 2},
        }
        super().__init__(folder, spec | changes, STAND_IN, server)

    def start(self) -> None:
        self.cli("up", str(self.yaml), "-y", "-d")
        leave_heartbeat(self.store)
        self.until("three machines", self.booted)
        nodes = self.state.nodes
        self.until("their work and its child", lambda: all(len(self.pids(node)) == 3 for node in nodes))

    def booted(self) -> bool:
        nodes = self.state.nodes.values()
        return len(nodes) == 3 and all(node.phase is NodePhase.BOOTING for node in nodes)
