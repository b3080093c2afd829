"""Stands in for a trainer that has trained, where a test's machines do none of their work: rollout nodes are asked
for only once one has."""

from __future__ import annotations

import time

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.tick.snapshot import Trainer


def leave_heartbeat(store: Store) -> None:
    """Write the last heartbeat of a machine that the run no longer has."""
    documents.TRAINER.write(store, Trainer("trainer-0-i0", 1, 0, 1, 10, "training", time.time()))
