"""The uploader's process, `python -m tasks.uploader`: stores what the trainer of this machine spools.

It is started beside the trainer and outlives it, so that a checkpoint which was sealed reaches the store also when
the trainer dies. It ends with the trainer's machine, or when it is told to.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from checkpoint import documents
from checkpoint.catalog import Checkpoint
from checkpoint.errors import StoreError
from checkpoint.spool import Seal
from checkpoint.store import Store
from checkpoint.timelines import read_forks
from checkpoint.uploader import LOOK_S, Retire, Uploader, yield_to_others
from policies.retention import Kept, retired
from policies.spec import CheckpointsSpec
from policies.timelines import lineage, on_lineage
from policies.vocabulary import PolicyVersion, slot_and_incarnation
from tasks.node_env import NodeEnv, read_node_env
from tasks.spooling import find_spool

STORE_PATIENCE_S = 30.0  # then the trainer is told, and it is tried again


def main() -> int:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    yield_to_others()
    env = read_node_env()
    store = Store(env.run, patience_s=STORE_PATIENCE_S)
    spec = documents.read_run(store).spec.checkpoints
    while (spool := find_spool(Path(env.workdir))) is None:
        time.sleep(LOOK_S)
    Uploader(store, spool, env.node, _retention(store, spec), lambda at: is_replaced(store, env, at)).run()
    return 0


def _retention(store: Store, spec: CheckpointsSpec) -> Retire:
    def retire(listed: Sequence[Checkpoint], newest: Seal | None) -> Sequence[PolicyVersion]:
        kept = [Kept(one.at, one.pinned) for one in listed]
        # Read behind the list: a checkpoint of a timeline that it does not show yet is left alone.
        before, since = (newest.keep_before_step, newest.keep_since_step) if newest is not None else (None, None)
        return retired(kept, spec.keep_last, spec.keep_every_steps, before, read_forks(store), since)

    return retire


def is_replaced(store: Store, env: NodeEnv, at: PolicyVersion) -> bool:
    """Whether the run goes on without this version: it is of a stretch that a fork has left, or a trainer of
    another machine is the newer one. One on this machine has waited for the spool."""
    forks = read_forks(store)
    if forks and not on_lineage(at, lineage(forks, forks[-1].timeline)):
        return True
    beat = documents.read_trainer(store)
    if beat is None or beat.node == env.node:
        return False
    own = (env.timeline, slot_and_incarnation(env.node)[1], env.attempt)
    return beat.precedence > own


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StoreError as error:
        sys.exit(f"grpo-orch uploader: {error}")
