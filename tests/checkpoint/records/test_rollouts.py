"""The stored training calls that no logged step has trained on."""

from __future__ import annotations

import itertools
from dataclasses import replace

from grpo_orch.checkpoint.records import metrics, rollouts
from grpo_orch.checkpoint.records.metrics import MetricsRow
from grpo_orch.checkpoint.records.rollouts import EVALUATION_CALLS, Rollout, Session, unused_windows
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import Branch, Completion, Turn

_names = itertools.count()


def stored(*windows: tuple[int, int, int], timeline: int = 0) -> Store:
    """A store whose steps 1 to 6 are logged; windows are (step, call, tokens)."""
    store = Store(f"memory://unused-{next(_names)}")
    writer = metrics.MetricsWriter(store)
    for step in range(1, 7):
        writer.append(MetricsRow(timeline, step, float(step), 1, {}))
    for step, call, tokens in windows:
        at = f"{timeline}-{step}"
        completion = Completion(0, list(range(tokens)), [0.0] * tokens, "stop", at, "n")
        rollouts.write_rollout(
            store, Rollout(1, at, f"{timeline}-{max(0, step - 1)}", call, "", [completion]), (0, 1, 1)
        )
    return store


def test_windows_beyond_the_last_logged_step_are_unused() -> None:
    store = stored((4, 0, 10), (5, 0, 20), (6, 0, 30), (7, 0, 40), (7, 1, 50))
    assert unused_windows(store, 0) == (3, 120)


def test_evaluations_and_other_timelines_do_not_count() -> None:
    store = stored((6, EVALUATION_CALLS, 30), (6, 0, 7))
    assert unused_windows(store, 0) == (1, 7)
    assert unused_windows(store, 1) == (0, 0)


def test_call_stored_by_two_trainers_counts_once() -> None:
    store = stored((6, 0, 30))
    newer = Rollout(1, "0-6", "0-5", 0, "", [Completion(0, [1] * 4, [0.0] * 4, "stop", "0-5", "n")])
    rollouts.write_rollout(store, newer, (0, 1, 2))
    assert unused_windows(store, 0) == (1, 4)


def test_unreadable_record_is_left_out() -> None:
    store = stored((6, 0, 30), (7, 0, 5))
    store.put(layout.rollout(PolicyVersion(0, 6), 0, (0, 1, 1)), b"{")
    assert unused_windows(store, 0) == (1, 5)


def test_stored_sessions_count_the_policys_tokens() -> None:
    store = stored()
    branch = Branch([1, 2, 3, 4], 1, [0, 1, 0, 1], [0.0, -1.0, 0.0, -2.0], [Turn(1, 2, "stop", "n")], [])
    short = replace(branch, token_ids=[1, 2], mask=[0, 1], logprobs=[0.0, -1.0])
    sessions = [
        Session(0, "0-6-0-0-0", "0-6", [short, branch], 0.5),
        Session(1, "0-6-0-0-1", "0-6", [], None, "died"),
    ]
    rollout = Rollout(1, "0-6", "0-6", 0, "", [], sessions=sessions)
    rollouts.write_rollout(store, rollout, (0, 1, 1))
    [key] = rollouts.stored_since(store, PolicyVersion(0, 6))[PolicyVersion(0, 6), 0]
    assert rollouts.read_rollout(store, key) == rollout
    assert unused_windows(store, 0) == (1, 3)


def test_staleness_is_in_optimizer_steps() -> None:
    assert Rollout(1, "1-12", "1-8", 0, "", []).staleness == 4
