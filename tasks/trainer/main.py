"""The trainer's process: `python -m grpo_orch.tasks.trainer.main`.

It reads the run from the store, restores the newest checkpoint on the line of its timeline, and trains to the last
step, or until it finds that the run diverges. All lasting state is in the store. It exits with one of
`policies.model.exit_codes` and prints the reason as its last line on stderr.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from grpo_orch.checkpoint.records.documents import RunRecord, read_forks
from grpo_orch.checkpoint.security.redaction import guard_output
from grpo_orch.checkpoint.security.vouched import UntrustedRun
from grpo_orch.checkpoint.store.errors import NoIntactCheckpoint, NotFound, StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.spec import RunSpec, model_settings
from grpo_orch.policies.model.timelines import Fork, forked_spec, lineage
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.joining import Stage
from grpo_orch.policies.tick.snapshot import Trainer
from grpo_orch.tasks.completions.gateway_client import GenerationFailed
from grpo_orch.tasks.completions.refused_prompts import BadPrompts
from grpo_orch.tasks.machine.children import end_with_parent
from grpo_orch.tasks.machine.exit_note import leave_exit_code
from grpo_orch.tasks.machine.leaving import LeaveNow, Leaving, await_predecessor, stop_file
from grpo_orch.tasks.machine.node_env import NodeEnv, NodeEnvMissing, read_node_env, read_run_here
from grpo_orch.tasks.machine.spooling import SpoolFull, find_spool, remove_spool
from grpo_orch.tasks.machine.versions import TRAINER, WrongVersions, check_versions
from grpo_orch.tasks.models import shared
from grpo_orch.tasks.models.base import BaseModel, found_here, source_of
from grpo_orch.tasks.rewards.user_calls import BadReward, ToolFailed
from grpo_orch.tasks.storing.heartbeat import Fenced, Heartbeat
from grpo_orch.tasks.storing.restoring import Restored, restore_once

log = structlog.get_logger()

STORE_RETRY_S = 600.0  # do not lose trained steps to a store that is unavailable for minutes
BEAT_RETRY_S = 5.0  # the next heartbeat is worth more than a late one
# The heartbeat's final activity after an orderly exit, when every sealed checkpoint is stored.
FINAL_ACTIVITIES = {
    exit_codes.OK: "done",
    exit_codes.DIVERGED: "diverged",
    exit_codes.STOPPED: "stopped",
    exit_codes.OUT_OF_MEMORY: "out_of_memory",
    exit_codes.NOTHING_LEARNT: "nothing_learnt",
}
End = tuple[int, str]  # an exit code and why
Work = Callable[[NodeEnv, RunRecord, Store, Heartbeat, Leaving], End]
RANK = int(os.environ.get("RANK", "0"))  # set by accelerate's launcher; rank 0 reports for all ranks
# Errors that `_run` maps to exit codes.
EXPECTED_ERRORS = (
    Fenced,
    LeaveNow,
    BadPrompts,
    GenerationFailed,
    NoIntactCheckpoint,
    UntrustedRun,
    WrongVersions,
    StoreError,
)
RESTORED = "restored"  # folder in the machine's workdir
END_S = 120.0  # lets experiment trackers send their last data; nodes and the next trainer wait meanwhile


def main() -> int:
    """Train the run that the environment names and return the exit code."""
    return run_process("trainer", _train)


def run_process(role: str, work: Work) -> int:
    """Do `work` for the run that the environment names, with heartbeats meanwhile, and return the exit code."""
    guard_output()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        env = read_node_env()
    except NodeEnvMissing as error:
        print(f"grpo-orch {role}: {error}", file=sys.stderr, flush=True)
        return exit_codes.USAGE
    code, why = _run(env, work)
    if RANK == 0 or code != exit_codes.OK:  # success of another rank must not overwrite the reason
        leave_exit_code(Path(env.workdir), code, why)
        print(f"grpo-orch {role}: {why}", file=sys.stderr, flush=True)
    return code


def _run(env: NodeEnv, work: Work) -> End:
    store = Store(env.run, retry_s=STORE_RETRY_S)
    beat = Trainer(env.node, env.attempt, env.timeline, 0, 0, "starting", time.time())
    end = functools.partial(exit_now, Path(env.workdir))
    leaving = Leaving(Path(env.workdir), env.attempt)
    # Slurm signals every process of a job. By default that would kill this one before it stores its last steps.
    signal.signal(signal.SIGTERM, lambda *_: stop_file(Path(env.workdir), env.attempt).touch())
    heartbeat = Heartbeat(Store(env.run, retry_s=BEAT_RETRY_S), beat, leaving=leaving, end=end)
    if "RANK" in os.environ:  # a killed launcher does not end its processes
        end_with_parent()
    try:
        record = read_run_here(store, env.token)
        if RANK == 0:
            await_predecessor(store, env, frozenset(FINAL_ACTIVITIES.values()))
            heartbeat.start()
        return work(env, record, store, heartbeat, leaving)
    except Fenced as error:
        return exit_codes.FENCED, f"stopped: {error}"
    except LeaveNow:
        return exit_codes.STOPPED if RANK == 0 else exit_codes.OK, "stopped before training started"
    except GenerationFailed as error:
        return exit_codes.UNAVAILABLE, f"generation failed: {error}"
    except NoIntactCheckpoint as error:
        return exit_codes.NO_INTACT_CHECKPOINT, str(error)
    except (BadPrompts, UntrustedRun, WrongVersions) as error:
        return exit_codes.BAD_SPEC, str(error)
    except StoreError as error:
        return exit_codes.UNAVAILABLE, f"the run store failed: {error}"
    except Exception as error:  # noqa: BLE001  # every error must reach the last line
        traceback.print_exception(error)
        return exit_codes.FAILED, f"{type(error).__name__}: {' '.join(str(error).split())}"


def _train(env: NodeEnv, record: RunRecord, store: Store, heartbeat: Heartbeat, leaving: Leaving) -> End:
    check_versions(TRAINER)
    import_torch()
    from grpo_orch.tasks.storing.saving import wait_until_stored
    from grpo_orch.tasks.trainer.assemble import assemble
    from grpo_orch.tasks.trainer.user_objects import BadSpec

    workdir, forks = Path(env.workdir), _read_forks(store, env.timeline)
    # Rank 0 restores for all: the others read the same folder.
    fetch = functools.partial(_restore, env, record, store, heartbeat, forks)
    restored = restore_once(workdir, env.attempt, fetch if RANK == 0 else None, leaving)
    resumed_at = PolicyVersion(env.timeline, 0) if restored is None else restored.at
    heartbeat.update("starting", step=resumed_at.step)
    if restored is not None and _is_last(restored.folder, _max_steps(record.spec, forks)):
        why = f"nothing left to train: the run is complete at step {resumed_at.step}"
        if RANK != 0:
            return exit_codes.OK, why
        code, why = _learning_result(store, record.spec, why)
        heartbeat.update(max_steps=resumed_at.step)
        heartbeat.stop(FINAL_ACTIVITIES[code])
        return code, why
    try:
        base_model = found_here(workdir)
        trainer, spool = assemble(env, record, store, heartbeat, leaving, restored, forks, base_model)
    except BadSpec as error:
        return exit_codes.BAD_SPEC, str(error)
    except EXPECTED_ERRORS:
        raise
    except Exception as error:  # noqa: BLE001  # libraries and the user's data may raise anything
        return unexpected_error(error, is_first=restored is None, when="before training")
    if RANK == 0:
        log.info("training", from_policy=str(resumed_at), timeline=env.timeline, attempt=env.attempt)
    code, why = _train_to_the_end(trainer, None if restored is None else str(restored.folder))
    if code == exit_codes.OK and RANK == 0:
        heartbeat.update(max_steps=trainer.state.global_step)  # with epochs, transformers may have estimated more
        code, why = _learning_result(store, record.spec, why)
    if spool is not None and code in FINAL_ACTIVITIES:
        heartbeat.update("storing")
        wait_until_stored(spool, heartbeat)
        if (stored := spool.reported().stored) is not None:
            heartbeat.update(stored_step=PolicyVersion.parse(stored).step)
        remove_spool(workdir)
        heartbeat.stop(FINAL_ACTIVITIES[code])
    return code, why


def import_torch() -> None:
    """Import torch, which takes seconds: only after the first heartbeat."""
    import torch

    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    warnings.filterwarnings("ignore", message=".*pin_memory.*")


def _restore(
    env: NodeEnv, record: RunRecord, store: Store, heartbeat: Heartbeat, forks: Sequence[Fork]
) -> Restored | None:
    """Restore the newest checkpoint, after storing all that earlier attempts on this machine have sealed."""
    from grpo_orch.tasks.storing.restoring import restore_newest
    from grpo_orch.tasks.storing.saving import wait_until_stored
    from grpo_orch.tasks.trainer.user_objects import local_folder

    workdir = Path(env.workdir)
    if (old_spool := find_spool(workdir)) is not None:
        heartbeat.update("storing")
        wait_until_stored(old_spool, heartbeat)
    heartbeat.update("restoring")
    own_model = found_here(workdir) or local_folder(record.spec.trainer, Path(record.spec.workdir))
    line, report = lineage(forks, env.timeline), functools.partial(_report_stage, heartbeat)
    restored = restore_newest(store, line, workdir / RESTORED, own_model, report)
    fetch_base_model(workdir, record.spec, store, report, None if restored is None else restored.base_model)
    return restored


def fetch_base_model(
    workdir: Path, spec: RunSpec, store: Store, report: Callable[[Stage], None], folder: Path | None
) -> None:
    """Fetch the base model to this machine, unless a checkpoint has restored it to `folder`.

    If it does not come from the store, publish it there in the background for later machines.
    """
    source = source_of(spec, model_settings(spec.grpo))
    if source is None:
        return
    if folder is None:
        folder = BaseModel(store, source, workdir, os.environ, spec.policies.boot_timeout_s, report).whole()
    if folder is not None and source.is_shared and folder != found_here(workdir):
        shared.begin_publishing(source.model, source.revision, folder)


def _report_stage(heartbeat: Heartbeat, stage: Stage) -> None:
    heartbeat.update(stage=stage)


def _train_to_the_end(trainer: Any, resume_from: str | None) -> End:
    """Train and return the outcome. Re-raises FORESEEN errors, which `_run` handles."""
    from grpo_orch.tasks.storing.tensors import UnsupportedType
    from grpo_orch.tasks.trainer.callbacks import Diverged
    from grpo_orch.tasks.trainer.user_objects import BadSpec
    from grpo_orch.tasks.trl.parts.rewards import NothingToLearn

    try:
        trainer.train(resume_from_checkpoint=resume_from)
    except LeaveNow:
        stored = trainer.save_before_leaving()
        # The launcher ends all ranks when one fails, and rank 0 still waits for its uploader.
        code = exit_codes.STOPPED if RANK == 0 else exit_codes.OK
        return code, f"stopped at step {trainer.state.global_step}; stored up to step {stored or 0}"
    except (SpoolFull, UnsupportedType, BadSpec) as error:
        return exit_codes.BAD_SPEC, str(error)
    except (BadReward, ToolFailed) as error:
        # A judge over the network may recover.
        why = f"at step {trainer.state.global_step + 1}: {error}; see policies.on_bad_reward"
        return exit_codes.UNAVAILABLE, why
    except NothingToLearn as error:
        why = f"stopped at step {trainer.state.global_step + 1}: {error}"
        return exit_codes.NOTHING_LEARNT if RANK == 0 else exit_codes.OK, why  # as for LeaveNow
    except Diverged as error:
        return exit_codes.DIVERGED, f"stopped at step {trainer.state.global_step}: {error}"
    except EXPECTED_ERRORS:
        raise
    except Exception as error:  # noqa: BLE001  # libraries and the user's data may raise anything
        step = trainer.state.global_step
        return unexpected_error(error, is_first=step == 0, when=f"at step {step + 1}", trains=True)
    return end_of_training(trainer)


def end_of_training(trainer: Any) -> End:
    """Return OK only if every step was trained.

    transformers also ends without an error when the data gives no further batch.
    """
    state, config = trainer.state, trainer.args
    by_epochs = config.max_steps <= 0 and (state.epoch or 0.0) >= config.num_train_epochs
    if state.global_step >= state.max_steps or (by_epochs and state.global_step):
        return exit_codes.OK, f"complete at step {state.global_step}"
    done = f"training ended at step {state.global_step} of {state.max_steps}"
    return exit_codes.FAILED, f"{done}: trainer.dataset ({len(trainer.train_dataset)} rows) gave no further batch"


def _learning_result(store: Store, spec: RunSpec, why: str) -> End:
    """Return the outcome of a complete training: NOTHING_LEARNT if no step had a reward."""
    from grpo_orch.tasks.trainer.callbacks import count_rewards

    by_agent = [] if spec.trainer.agent is None else ["agent"]
    counts, names = count_rewards(store), ", ".join([*spec.trainer.reward_funcs, *by_agent])
    if counts.rows and not counts.rewarded:
        returned = f"the run's rewards ({names}) were None or NaN for all of them"
        return exit_codes.NOTHING_LEARNT, f"{why}, and no completion ever had a reward: {returned}"
    if counts.rows and not counts.varied:
        why += "; no group ever had variance in its rewards: nothing was learnt"
        log.warning("nothing_learnt", logged_steps=counts.rows, reward_functions=names)
    return exit_codes.OK, why


def unexpected_error(error: Exception, *, is_first: bool, when: str, trains: bool = False) -> End:
    """Return the outcome for an error that no specific handler covers.

    Args:
        is_first: the run has no step yet, so the likely cause is a mistake in run.yaml.
        when: names the time in the reason.
        trains: training was in progress, where using less memory may help.
    """
    from grpo_orch.tasks.trainer.user_objects import is_mistake, is_of_machine, is_out_of_memory, passes

    line = " ".join(str(error).split())
    if trains and is_out_of_memory(error):
        return exit_codes.OUT_OF_MEMORY, f"out of memory {when}: {line}"
    traceback.print_exception(error)
    why = f"{when}: {type(error).__name__}: {line}"
    if passes(error) or is_of_machine(error):
        return exit_codes.UNAVAILABLE, why
    return exit_codes.BAD_SPEC if is_first and is_mistake(error) else exit_codes.FAILED, why


def _read_forks(store: Store, timeline: int) -> tuple[Fork, ...]:
    """Read the forks that began the timelines. Raises NotFound if this timeline has not begun."""
    forks = read_forks(store)
    if timeline not in (0, *(fork.timeline for fork in forks)):
        raise NotFound(f"timeline {timeline} has not begun", "only the controller begins one")
    return forks


def _max_steps(spec: RunSpec, forks: Sequence[Fork]) -> int:
    return int(forked_spec(spec, forks[-1] if forks else None).grpo.get("max_steps", -1))


def _is_last(checkpoint: Path, max_steps: int) -> bool:
    """Return True if no step is left. `max_steps` may have been raised since the checkpoint; -1: by epochs."""
    state: dict[str, Any] = json.loads((checkpoint / "trainer_state.json").read_text())
    return bool(state["global_step"] >= (max_steps if max_steps > 0 else state["max_steps"]))


def exit_now(workdir: Path, code: int) -> None:
    """Exit immediately, leaving the exit code on the machine."""
    leave_exit_code(workdir, code)
    os._exit(code)


def end_process(code: int) -> None:
    """Run Python's exit handlers for at most END_S, then exit without finalizing the interpreter.

    torch's threads may abort an interpreter that finalizes, which the launcher takes for a failure. Without the
    limit, a tracker whose server hangs would delay the exit for hours.
    """
    if RANK == 0:  # the other ranks have nothing left to send
        forced_exit = threading.Timer(END_S, os._exit, (code,))
        forced_exit.daemon = True
        forced_exit.start()
        threading._shutdown()  # type: ignore[attr-defined]  # typeshed has only the public names
        atexit._run_exitfuncs()  # experiment trackers finish their runs here
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end_process(main())
