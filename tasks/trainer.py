"""The trainer's process: `python -m tasks.trainer`.

It reads the run from the store, takes up the newest checkpoint of its timeline, and trains to the last step. All
that outlives it is in the store. It ends with one of `policies.exit_codes`; its last line on stderr is why.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import structlog

from checkpoint.documents import RunRecord
from checkpoint.errors import StoreError
from checkpoint.store import Store
from policies import exit_codes
from policies.snapshot import Trainer
from policies.vocabulary import PolicyVersion
from tasks.gateway_client import GenerationFailed
from tasks.heartbeat import Fenced, Heartbeat
from tasks.node_env import NodeEnv, NotANode, read_node_env, read_run_here

log = structlog.get_logger()

STORE_PATIENCE_S = 600.0  # what is trained is not thrown away for a store that is away for minutes
BEAT_PATIENCE_S = 5.0
RANK = int(os.environ.get("RANK", "0"))  # set by accelerate's launcher; the first process speaks for all


def main() -> int:
    """Train the run that the environment names. Returns the exit code."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        env = read_node_env()
    except NotANode as error:
        return _end(exit_codes.USAGE, str(error))
    store = Store(env.run, patience_s=STORE_PATIENCE_S)
    beat = Trainer(env.node, env.attempt, env.timeline, 0, 0, "starting", time.time())
    heartbeat = Heartbeat(Store(env.run, patience_s=BEAT_PATIENCE_S), beat)
    try:
        record = read_run_here(store)
        if RANK == 0:
            heartbeat.start()
        return _train(env, record, store, heartbeat)
    except Fenced as error:
        return _end(exit_codes.FENCED, f"stopped: {error}")
    except GenerationFailed as error:
        return _end(exit_codes.FAILED, f"generation failed: {error}")
    except StoreError as error:
        return _end(exit_codes.FAILED, f"the run store failed: {error}")


def _train(env: NodeEnv, record: RunRecord, store: Store, heartbeat: Heartbeat) -> int:
    # Behind the first heartbeat: these imports take seconds.
    import torch

    from tasks.assemble import assemble
    from tasks.checkpoints import drain, restore_newest
    from tasks.spooling import NoRoom, find_spool, remove_spool
    from tasks.user_objects import BadSpec, local_folder

    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    workdir = Path(env.workdir)
    if (left := find_spool(workdir)) is not None:  # by an earlier attempt on this machine
        heartbeat.say("storing")
        drain(left, heartbeat)
    heartbeat.say("restoring")
    own_model = local_folder(record.spec.trainer, Path(record.spec.workdir))
    restored = restore_newest(store, env.timeline, workdir / f"restored-{RANK}", own_model)
    resumed_at = PolicyVersion(env.timeline, 0) if restored is None else restored.at
    heartbeat.say("starting", step=resumed_at.step)
    if restored is not None and _is_last(restored.folder):
        if RANK == 0:
            heartbeat.say(max_steps=resumed_at.step)
            heartbeat.stop("done")
        return _end(exit_codes.OK, f"nothing left to train: the run is complete at step {resumed_at.step}")
    try:
        trainer, spool = assemble(env, record, store, heartbeat, restored)
    except BadSpec as error:
        return _end(exit_codes.BAD_SPEC, str(error))
    log.info("training", from_policy=str(resumed_at), attempt=env.attempt)
    try:
        trainer.train(resume_from_checkpoint=None if restored is None else str(restored.folder))
    except NoRoom as error:
        return _end(exit_codes.BAD_SPEC, str(error))
    if RANK == 0:
        heartbeat.say("storing")
        drain(spool, heartbeat)
        remove_spool(workdir)
        heartbeat.stop("done")
    return _end(exit_codes.OK, f"complete at step {trainer.state.global_step}")


def _is_last(checkpoint: Path) -> bool:
    state: dict[str, Any] = json.loads((checkpoint / "trainer_state.json").read_text())
    return bool(state["global_step"] >= state["max_steps"])


def _end(code: int, why: str) -> int:
    print(f"grpo-orch trainer: {why}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
