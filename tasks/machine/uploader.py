"""Store the checkpoints that this machine's trainer spools: `python -m grpo_orch.tasks.machine.uploader`.

The uploader runs next to the trainer and outlives it, so that a sealed checkpoint reaches the store even if the
trainer dies. It ends with the trainer's machine, or on SIGTERM.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from grpo_orch.checkpoint.records import documents, rollouts
from grpo_orch.checkpoint.records.documents import read_forks
from grpo_orch.checkpoint.security.redaction import guard_output
from grpo_orch.checkpoint.security.vouched import UntrustedRun
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream.catalog import Checkpoint
from grpo_orch.checkpoint.stream.spool import Seal
from grpo_orch.checkpoint.stream.uploader import POLL_S, Retire, Tidy, Uploader, yield_to_others
from grpo_orch.policies.ledger.retention import (
    RetentionRules,
    StoredCheckpoint,
    versions_to_delete,
    versions_to_retire,
)
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.spec import CheckpointsSpec
from grpo_orch.policies.model.timelines import lineage, on_lineage
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.machine.node_env import NodeEnv, read_node_env, read_run_here
from grpo_orch.tasks.machine.spooling import find_spool

log = structlog.get_logger()

STORE_RETRY_S = 30.0  # then the error is reported to the trainer, and the upload starts again


def main() -> int:
    guard_output()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    yield_to_others()
    env = read_node_env()
    store = Store(env.run, retry_s=STORE_RETRY_S)
    try:
        spec = read_run_here(store, env.token).spec.checkpoints
    except UntrustedRun as error:
        print(f"grpo-orch uploader: {error}", file=sys.stderr, flush=True)
        return exit_codes.BAD_SPEC
    while (spool := find_spool(Path(env.workdir))) is None:
        time.sleep(POLL_S)
    retire, tidy = retention(store, spec), _tidying(store, spec)
    Uploader(store, spool, env.node, retire, lambda at: is_replaced(store, env, at), tidy).run()
    return 0


def retention(store: Store, spec: CheckpointsSpec) -> Retire:
    """Return the rule that names the checkpoints to retire."""

    def retire(listed: Sequence[Checkpoint], newest: Seal | None) -> Sequence[PolicyVersion]:
        stored = [StoredCheckpoint(checkpoint.at, checkpoint.pinned) for checkpoint in listed]
        # Read the forks after the list: checkpoints of a timeline without a fork yet are kept.
        before, since = (newest.keep_before_step, newest.keep_since_step) if newest is not None else (None, None)
        rules = RetentionRules(spec.keep_last, spec.keep_every_steps, before, since)
        return versions_to_retire(stored, read_forks(store), rules)

    return retire


def _tidying(store: Store, spec: CheckpointsSpec) -> Tidy:
    def tidy(listed: Sequence[Checkpoint]) -> None:
        def to_delete(stored: Sequence[PolicyVersion]) -> Sequence[PolicyVersion]:
            held = [checkpoint.at for checkpoint in listed]
            # Read the forks after the list, as above.
            return versions_to_delete(
                stored, held, spec.keep_last, spec.keep_rollouts_every_steps, read_forks(store)
            )

        if deleted := rollouts.collect(store, to_delete):
            log.info("rollouts_deleted", records=deleted)

    return tidy


def is_replaced(store: Store, env: NodeEnv, at: PolicyVersion) -> bool:
    """Return whether the run continues without this version.

    That is so if it is not on the lineage of the newest fork, or if a trainer on another machine is newer. A newer
    trainer on this machine has waited for the spool, so it does not count.
    """
    forks = read_forks(store)
    if forks and not on_lineage(at, lineage(forks, forks[-1].timeline)):
        return True
    beat = documents.TRAINER.read(store, UnreadableDocuments())
    if beat is None or beat.node == env.node:
        return False
    return beat.precedence > env.precedence


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StoreError as error:
        sys.exit(f"grpo-orch uploader: {error}")
