"""The evaluator, which replaces the trainer in an evaluation run.

For each policy of the evaluated run, it loads the policy, publishes it as a trainer does, sends all prompts in one
batch, scores the completions and stores the results. Then the run is finished and its machines are released. The
process may be killed at any time: finished policies are stored, and only the current one is generated again.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import structlog

from grpo_orch.checkpoint.records import evaluations
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.store.errors import Corrupt, NotFound
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream.catalog import Catalog, Checkpoint
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.vocabulary import BASE, Evaluation, PolicyVersion, Subject
from grpo_orch.tasks.machine.leaving import LeaveNow, Leaving
from grpo_orch.tasks.machine.node_env import NodeEnv
from grpo_orch.tasks.machine.versions import TRAINER, check_versions
from grpo_orch.tasks.models.base import found_here
from grpo_orch.tasks.rewards.user_calls import BadReward, ToolFailed
from grpo_orch.tasks.storing.heartbeat import Heartbeat
from grpo_orch.tasks.trainer.main import (
    FINAL_ACTIVITIES,
    STORE_RETRY_S,
    End,
    end_process,
    fetch_base_model,
    import_torch,
    run_process,
)

log = structlog.get_logger()

FETCHED = "evaluated"  # in the machine's working folder


def main() -> int:
    """Run the evaluation that the environment names. Return the exit code."""
    return run_process("evaluator", _run)


def _run(env: NodeEnv, record: RunRecord, store: Store, heartbeat: Heartbeat, leaving: Leaving) -> End:
    code, why = run_evaluation(env, record, store, heartbeat, leaving)
    if code in FINAL_ACTIVITIES:
        heartbeat.stop(FINAL_ACTIVITIES[code])
    return code, why


def run_evaluation(env: NodeEnv, record: RunRecord, store: Store, heartbeat: Heartbeat, leaving: Leaving) -> End:
    """Evaluate the policies that have no result yet. Returns the exit code and its reason."""
    check_versions(TRAINER)
    evaluation = record.evaluation
    if evaluation is None:
        return exit_codes.BAD_SPEC, "the run is no evaluation"
    missing = [
        (number, subject)
        for number, subject in enumerate(evaluation.subjects)
        if evaluations.evaluated(subject.name).read(store) is None
    ]
    heartbeat.update(max_steps=len(evaluation.subjects), step=len(evaluation.subjects) - len(missing))
    if missing:
        import_torch()
        from grpo_orch.tasks.storing.tensors import UnsupportedType
        from grpo_orch.tasks.trainer.user_objects import BadSpec, is_out_of_memory

        try:
            _evaluate_each(missing, env, record, evaluation, store, heartbeat, leaving)
        except LeaveNow:
            return exit_codes.STOPPED, "stopped; the finished policies are stored"
        except (BadReward, ToolFailed) as error:
            return exit_codes.UNAVAILABLE, f"{error}; see policies.on_bad_reward"
        except (BadSpec, UnsupportedType) as error:
            return exit_codes.BAD_SPEC, str(error)
        except (NotFound, Corrupt) as error:
            return exit_codes.BAD_SPEC, f"what is to be evaluated cannot be read: {error}"
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # Not OUT_OF_MEMORY: a run handles that with a new timeline, which changes only training settings.
            return exit_codes.FAILED, f"out of memory: {str(error).strip().partition(chr(10))[0]}"
    heartbeat.update(step=len(evaluation.subjects))  # the controller compares it with max_steps
    unpin(evaluation)
    return exit_codes.OK, f"evaluated {', '.join(subject.name for subject in evaluation.subjects)}"


def _evaluate_each(
    missing: list[tuple[int, Subject]],
    env: NodeEnv,
    record: RunRecord,
    evaluation: Evaluation,
    store: Store,
    heartbeat: Heartbeat,
    leaving: Leaving,
) -> None:
    from grpo_orch.tasks.evaluating.assemble_evaluator import assemble_evaluator, evaluate, refuse_other_rows
    from grpo_orch.tasks.storing.restoring import restore_weights
    from grpo_orch.tasks.storing.step_costs import StepCosts
    from grpo_orch.tasks.trainer.start import Start
    from grpo_orch.tasks.trainer.user_objects import local_folder

    workdir, spec = Path(env.workdir), record.spec
    parent = Store(evaluation.of, retry_s=STORE_RETRY_S)
    say: Any = lambda stage: heartbeat.update(stage=stage)  # noqa: E731
    own_model = found_here(workdir) or local_folder(spec.trainer, Path(spec.workdir))
    folders: dict[str, Path | None] = {BASE: None}
    heartbeat.update("restoring")
    base_model: Path | None = None
    for _, subject in missing:
        if subject.name != BASE:
            folder = workdir / FETCHED / subject.name
            checkpoint = Checkpoint(subject.name, subject.manifest, subject.digest, 0.0, 0)
            restored = restore_weights(parent, checkpoint, folder, own_model, say)
            folders[subject.name] = restored.folder
            base_model = restored.base_model or base_model
    fetch_base_model(workdir, spec, store, say, base_model)
    heartbeat.update("starting")
    base_folder = base_model or found_here(workdir)
    start = Start(env, record, store, heartbeat, leaving, None, base_folder, StepCosts())
    evaluator = assemble_evaluator(start, evaluation.rows)
    refuse_other_rows(store, evaluation, evaluator)
    for number, subject in missing:
        heartbeat.update("training", step=number)
        log.info("evaluating", subject=subject.name, rows=len(evaluator.rows))
        evaluator.load(number, folders[subject.name])
        summary, samples = evaluate(evaluator, subject.name)
        evaluations.write_samples(store, subject.name, samples)
        evaluations.evaluated(subject.name).write(store, summary)  # written last: it marks the samples as complete
        heartbeat.update("training", step=number + 1)


def unpin(evaluation: Evaluation) -> None:
    """Unpin checkpoints that were pinned for this evaluation and that no other one needs.

    The retention policy of their run applies to them again. Raises StoreError.
    """
    parent = Store(evaluation.of, retry_s=STORE_RETRY_S)
    catalog = Catalog(parent, "evaluation")
    needed = evaluations.still_needed(parent)
    for subject in evaluation.subjects:
        is_listed = any(checkpoint.version == subject.name for checkpoint in catalog.newest().checkpoints)
        if subject.pinned and is_listed and subject.name not in needed:
            catalog.pin(time.time(), PolicyVersion.parse(subject.name), pinned=False)


if __name__ == "__main__":
    end_process(main())
