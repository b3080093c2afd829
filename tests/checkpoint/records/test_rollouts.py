"""Stored calls, and what people read of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_orch.checkpoint.records import metrics, rollouts, samples
from grpo_orch.checkpoint.records.metrics import MetricsRow
from grpo_orch.checkpoint.records.rollouts import EVALUATION_CALLS, Rollout, Session, unused_windows
from grpo_orch.checkpoint.records.samples import Group, Head, Message, Sample
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import Corrupt
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


# What people read of a step: written, cut, read back, and refused where it is not what was written.

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def group(prompt: str, *completions: str) -> Group:
    made = [Sample([Message(one, "assistant")], [1.0, None], 1.0, -0.5, 3, False, "n") for one in completions]
    return Group([Message(prompt, "user")], made)


def head(call: int = 0, groups: int = 1, step: int = 4) -> Head:
    return Head(samples.SCHEMA, f"0-{step}", step + 1, call, 1.0, ["f", "g"], [1.0, 0.5], groups)


@given(st.lists(st.tuples(TEXT, TEXT), max_size=4))
def test_any_text_is_read_as_it_was_written(texts: list[tuple[str, str]]) -> None:
    store, groups = Store("memory://samples"), [group(*pair) for pair in texts]
    samples.write_samples(store, head(groups=len(groups)), groups, (0, 1, 1))
    (key,) = samples.stored_calls(store)[PolicyVersion(0, 4)]
    told, found = samples.read_samples(store, key)
    assert (told, list(found)) == (head(groups=len(groups)), groups)


@given(st.lists(TEXT, min_size=1, max_size=6), st.integers(0, 40))
def test_texts_are_cut_in_their_middle_to_one_length(texts: list[str], chars: int) -> None:
    (found,) = samples.cut_texts([group(*texts)], chars)
    cut = [*found.prompt, *(message for one in found.samples for message in one.completion)]
    assert sum(len(one.text) for one in cut) <= max(chars, 0)
    longest = max(len(one.text) for one in cut)
    for whole, one in zip(texts, cut, strict=True):
        assert len(one.text) + one.left_out == len(whole)
        assert len(one.text) == longest or not one.left_out
        assert one.text == whole[: len(one.text) - one.after] + whole[len(whole) - one.after :]


def test_newest_trainers_samples_are_read_and_deleted_with_call(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    for call, by in ((0, (0, 1, 1)), (1, (0, 1, 1)), (0, (0, 1, 2))):
        samples.write_samples(store, head(call), [group("p", "c")], by)
    at = PolicyVersion(0, 4)
    newest = [layout.samples_of_call(at, 0, (0, 1, 2)), layout.samples_of_call(at, 1, (0, 1, 1))]
    assert samples.stored_calls(store) == {at: newest}
    assert rollouts.collect(store, lambda stored: stored) == 3
    assert samples.stored_calls(store) == {}


@pytest.mark.parametrize("damage", [lambda it: it[: len(it) // 2], lambda _: b"", lambda _: b"{}"])
def test_incomplete_sample_is_marked(tmp_path: Path, damage: object) -> None:
    store = Store(f"file://{tmp_path}")
    samples.write_samples(store, head(), [group("p", "c" * 1000)], (0, 1, 1))
    key = samples.stored_calls(store)[PolicyVersion(0, 4)][0]
    store.put(key, damage(store.get(key)))  # type: ignore[operator]  # a function of the list above
    with pytest.raises(Corrupt):
        list(samples.read_samples(store, key)[1])
