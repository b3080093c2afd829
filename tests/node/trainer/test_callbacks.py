"""What a trainer's callbacks read and keep, however long the run is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from grpo_orch.checkpoint.records import rollouts
from grpo_orch.checkpoint.records.metrics import MetricsRow, MetricsWriter, read_metrics
from grpo_orch.checkpoint.records.rollouts import Rollout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.serving.wire import Completion
from grpo_orch.tasks.storing.step_costs import StepCosts
from grpo_orch.tasks.trainer.callbacks import LOGS_KEPT, CheckpointCallback, MetricsCallback

STEPS = 3_000


class Told(Store):
    """A store that notes what is read of it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.read = list[str]()

    def get_or_none(self, key: str) -> bytes | None:
        self.read.append(key)
        return super().get_or_none(key)


def test_resumed_trainer_reads_only_the_row_of_its_step() -> None:
    store = Told("memory://goes-on")
    writer = MetricsWriter(store)
    for step in range(50, STEPS + 1, 50):
        writer.append(MetricsRow(0, step, float(step), 1, {"reward": step / STEPS, "eval_reward": 0.5}))
    store.read.clear()
    callback = MetricsCallback(store, StepCosts(), 0, 2)
    state: Any = SimpleNamespace(global_step=STEPS)
    callback.on_train_begin(None, state, None)
    assert len(store.read) == 1
    callback.on_log(None, state, None, logs={"eval_loss": 0.25})  # of the same step, by the attempt that goes on
    last = read_metrics(store)[-1]
    assert (last.step, last.attempt) == (STEPS, 2)
    assert last.values | {"reward": 1.0, "eval_reward": 0.5, "eval_loss": 0.25} == last.values


def test_transformers_logs_in_memory_do_not_grow_with_the_run(tmp_path: Any) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path))
    state, control = TrainerState(), TrainerControl()
    callback = CheckpointCallback(lambda: False, lambda: None)
    state.log_history = [{"step": step, "reward": 0.5} for step in range(STEPS)]  # of a checkpoint from before
    for step in range(STEPS, STEPS + 10):
        state.log_history.append({"step": step, "reward": 0.5})
        callback.on_log(arguments, state, control)
    assert [row["step"] for row in state.log_history] == list(range(STEPS + 10 - LOGS_KEPT, STEPS + 10))


def at(step: int) -> Any:
    return SimpleNamespace(global_step=step)


def test_first_row_of_timeline_counts_unused_windows() -> None:
    store = Store("memory://unused-in-first-row")
    MetricsWriter(store).append(MetricsRow(0, 6, 6.0, 1, {}))
    completion = Completion(0, [1, 2, 3], [0.0] * 3, "stop", "0-5", "n")
    for step in (5, 6, 7):
        rollouts.write_rollout(store, Rollout(1, f"0-{step}", "0-5", 0, "", [completion]), (0, 1, 1))
    for attempt in (1, 2):  # the second starts over, and replaces the rows of the first
        callback = MetricsCallback(store, StepCosts(), 1, attempt)
        callback.on_train_begin(None, at(4), None)
        for step in (5, 6):
            callback.on_log(None, at(step), None, logs={"reward": 0.5})
    callback = MetricsCallback(store, StepCosts(), 1, 3)
    callback.on_train_begin(None, at(6), None)
    callback.on_log(None, at(7), None, logs={"reward": 0.5})
    rows = [row.values for row in read_metrics(store, 1)]
    assert [row.get("orch/unused_windows") for row in rows] == [2.0, None, None]
    assert rows[0]["orch/unused_tokens"] == 6.0


def test_staleness_of_a_row_is_the_most_of_its_windows() -> None:
    costs = StepCosts()
    for policy in ("0-4", "0-3"):
        costs.add(Rollout(1, "0-4", policy, 0, "", []), 0.0, training=True, replayed=False)
    costs.add(Rollout(1, "0-9", "0-0", 1000, "", []), 0.0, training=False, replayed=False)
    costs.add_generation(3.0, 1, unserved_s=0.5)
    told = costs.take()
    assert (told["orch/staleness"], told["orch/unserved_s"]) == (1.0, 0.5)
    assert "orch/staleness" not in costs.take()
