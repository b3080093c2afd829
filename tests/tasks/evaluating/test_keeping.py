"""Completions are stored as they come, and the next evaluator asks for the others alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_orch.checkpoint.records import evaluations
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.serving.wire import Batch, Completion, CompletionRequest, PolicyRef
from grpo_orch.tasks.completions.gateway_client import Generated, GenerationFailed
from grpo_orch.tasks.evaluating.stored_completions import KEEP_S, StoredCompletions

SAMPLING = {"temperature": 0.0, "max_tokens": 4}


class Fleet:
    """Completes a batch, and fails before the request at `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.asked: list[int] = []

    def complete(self, batch: Batch, arrived: Callable[[Completion], None]) -> Generated:
        made: list[Completion] = []
        for request in batch.requests:
            if request.index == self.fails_at:
                raise GenerationFailed("the deadline is over")
            self.asked.append(request.index)
            made.append(Completion(request.index, [request.index], [0.0], "stop", batch.policy.label, "n"))
            arrived(made[-1])
        return Generated(made, 3, 1.0)


def batch(digest: str = "aa", count: int = 6) -> Batch:
    requests = [CompletionRequest(index, [5, index], 0) for index in range(count)]
    return Batch(PolicyRef("0-1", "policies/x", digest), SAMPLING, requests, 10.0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store((tmp_path / "store").as_uri())


def keeping(store: Store, fleet: Fleet, attempt: int = 1) -> StoredCompletions:
    ticks = iter(range(0, 1000))
    return StoredCompletions(store, (0, 1, attempt), fleet, clock=lambda: next(ticks) * KEEP_S)


def test_stored_parts_are_not_requested_again(store: Store) -> None:
    first, second = Fleet(fails_at=4), Fleet()
    with pytest.raises(GenerationFailed):
        keeping(store, first).complete(batch())
    assert evaluations.count_completions(store) == 4
    found = keeping(store, second, attempt=2).complete(batch())
    assert second.asked == [4, 5]
    assert [one.token_ids for one in found.completions] == [[index] for index in range(6)]
    assert keeping(store, third := Fleet(), attempt=3).complete(batch()).completions == found.completions
    assert third.asked == []


def test_another_policy_or_another_question_takes_nothing_of_it(store: Store) -> None:
    keeping(store, Fleet()).complete(batch())
    for other in (batch(digest="bb"), batch(count=5)):
        fleet = Fleet()
        keeping(store, fleet, attempt=2).complete(other)
        assert len(fleet.asked) == len(other.requests)


def test_torn_part_is_made_again_and_nothing_is_left(store: Store) -> None:
    keeping(store, Fleet()).complete(batch())
    torn = store.entries("evaluated/kept")[0].key
    store.put(torn, b'[{"index": 0')
    fleet = Fleet()
    keeping(store, fleet, attempt=2).complete(batch())
    assert 0 < len(fleet.asked) < 6
    evaluations.delete_completions(store)
    assert store.entries("evaluated") == []
