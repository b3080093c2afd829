"""What people read of a step: written, cut, read back, and refused where it is not what was written."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_orch.checkpoint.records import rollouts, samples
from grpo_orch.checkpoint.records.samples import Group, Head, Message, Sample
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import Corrupt
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import PolicyVersion

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


def test_of_each_call_the_newest_trainers_is_read_and_all_go_with_the_completions(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    for call, by in ((0, (0, 1, 1)), (1, (0, 1, 1)), (0, (0, 1, 2))):
        samples.write_samples(store, head(call), [group("p", "c")], by)
    at = PolicyVersion(0, 4)
    newest = [layout.samples_of_call(at, 0, (0, 1, 2)), layout.samples_of_call(at, 1, (0, 1, 1))]
    assert samples.stored_calls(store) == {at: newest}
    assert rollouts.collect(store, lambda stored: stored) == 3
    assert samples.stored_calls(store) == {}


@pytest.mark.parametrize("damage", [lambda it: it[: len(it) // 2], lambda _: b"", lambda _: b"{}"])
def test_what_is_not_whole_is_said(tmp_path: Path, damage: object) -> None:
    store = Store(f"file://{tmp_path}")
    samples.write_samples(store, head(), [group("p", "c" * 1000)], (0, 1, 1))
    key = samples.stored_calls(store)[PolicyVersion(0, 4)][0]
    store.put(key, damage(store.get(key)))  # type: ignore[operator]  # a function of the list above
    with pytest.raises(Corrupt):
        list(samples.read_samples(store, key)[1])
