<<<<<<< HEAD:tests/tasks/completions/test_foreseen.py
"""Where a trainer's completions come from: foreseen calls are made together."""
=======
"""What a trainer's completions cost in time: every turn is measured, once."""
>>>>>>> 458aa70a (trl: find an evaluation's completions by prompt, not by call):tests/tasks/completions/test_generation_times.py

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import Batch, Completion, PolicyRef
from grpo_orch.tasks.completions.gateway_client import Generated
from grpo_orch.tasks.completions.refused_prompts import RefusedPrompts
from grpo_orch.tasks.completions.rollout_source import RolloutSource
from grpo_orch.tasks.storing.heartbeat import Heartbeat
from grpo_orch.tasks.storing.step_costs import StepCosts

AT = PolicyVersion(0, 20)
SAMPLES = 2


class Gateway:
    """Answers each request with its own seed and prompt: nothing else may decide what a completion is."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def complete(self, batch: Batch) -> Generated:
        self.batches.append(batch)
        made = [
            Completion(one.index, [one.seed, *one.prompt_token_ids], [0.0], "stop", batch.policy.label, "n")
            for one in batch.requests
        ]
        return Generated(made, 0, 0.0)


class Quiet:
    """A heartbeat that nobody hears."""

    def check(self) -> None: ...

    def update(self, *_: Any, **__: Any) -> None: ...


def source(store: Store, gateway: Any, costs: StepCosts | None = None) -> RolloutSource:
    costs = costs or StepCosts()
    refused = RefusedPrompts("skip", costs)
    return RolloutSource(
        store, gateway, cast(Heartbeat, Quiet()), costs, refused, by=(0, 1, 1), run_seed=7, deadline_s=1.0
    )


def asked(rollouts: RolloutSource, prompts: list[list[int]], *, training: bool = False) -> list[list[int]]:
    found = rollouts.complete(
        AT, prompts, SAMPLES, {"temperature": 1.0}, training=training, policies=lambda _: PolicyRef(str(AT), "p")
    )
    assert [one.index for one in found.completions] == list(range(len(prompts) * SAMPLES))
    return [one.token_ids for one in found.completions]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store((tmp_path / "store").as_uri())


<<<<<<< HEAD:tests/tasks/completions/test_foreseen.py
def test_concurrent_calls_equal_separate_ones(tmp_path: Path, store: Store) -> None:
    alone, gateway = Gateway(), Gateway()
    one_by_one = source(Store((tmp_path / "other").as_uri()), alone)
    expected = [asked(one_by_one, prompts) for prompts in CALLS]
    together = source(store, gateway)
    together.foresee(AT, CALLS, SAMPLES)
    assert [asked(together, prompts) for prompts in CALLS] == expected
    assert (len(alone.batches), len(gateway.batches)) == (3, 1)


def test_unforeseen_call_is_made_when_it_comes(store: Store) -> None:
    gateway = Gateway()
    rollouts = source(store, gateway)
    rollouts.foresee(AT, CALLS, SAMPLES)
    assert asked(rollouts, CALLS[0])
    assert asked(rollouts, [[9, 9]])[0][1:] == [9, 9]
    assert asked(rollouts, CALLS[0], training=True)
    assert asked(rollouts, CALLS[2])
    assert [len(one.requests) for one in gateway.batches] == [5 * SAMPLES, SAMPLES, 2 * SAMPLES]


def test_a_restarted_trainer_is_given_all_of_it_back(store: Store) -> None:
    first, second = Gateway(), Gateway()
    before = source(store, first)
    before.foresee(AT, CALLS, SAMPLES)
    expected = asked(before, CALLS[0])
    after = source(store, second)
    after.foresee(AT, CALLS, SAMPLES)
    assert asked(after, CALLS[0]) == expected
    assert asked(after, CALLS[1])
    assert second.batches == []


def test_the_next_evaluation_of_a_step_has_calls_of_its_own(store: Store) -> None:
    gateway = Gateway()
    rollouts = source(store, gateway)
    found = []
    for _ in range(2):
        rollouts.foresee(AT, CALLS, SAMPLES)
        found.append([asked(rollouts, prompts) for prompts in CALLS])
    assert len(gateway.batches) == 2
    assert found[0] != found[1]
=======
def test_nodes_time_before_the_trainers_own_turn_counts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait is taken off what came after that turn."""
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    class Nodes(Gateway):
        """They work, are lost, and come again."""

        def complete(self, batch: Batch) -> Generated:
            now_s[0] += 0.1 if self.batches else 0.4
            made = super().complete(batch)
            if len(self.batches) == 1:
                raise TrainerMustGenerate
            return Generated(made.completions, 0, wait_s=0.3)

    costs = StepCosts()
    rollouts = source(store, Nodes(), costs)
    with pytest.raises(TrainerMustGenerate):
        asked(rollouts, [[1]], training=True)
    asked(rollouts, [[1]], training=True)
    told = costs.take()
    assert told[WAIT_S] == told[UNSERVED_S] == 0.3
    assert told[STALENESS] == 0
    assert told[GENERATE_NODE_S] == told[GENERATE_S] == pytest.approx(0.4 + 0.1 - 0.3)


class Comes(Gateway):
    """Has no node for what is begun, and has one when the trainer waits for it."""

    def complete_in_background(self, *_: object) -> Generated:
        raise NoNodeServing([], [], 0, 0.0)

    def resume(self, *_: object) -> None: ...

    def complete(self, batch: Batch) -> Generated:
        time.sleep(0.3)
        return super().complete(batch)


def test_time_of_an_unmade_begun_call_counts_once(store: Store) -> None:
    costs = StepCosts()
    rollouts = source(store, Comes(), costs)
    sampling = {"temperature": 1.0}
    rollouts.begin([Call(AT, 0, AT, [[1, 2]], SAMPLES, sampling)], lambda _: PolicyRef(str(AT), "p"))
    began_s = time.monotonic()
    asked(rollouts, [[1, 2]], training=True)
    assert 0.3 <= costs.generated_s <= time.monotonic() - began_s
>>>>>>> 458aa70a (trl: find an evaluation's completions by prompt, not by call):tests/tasks/completions/test_generation_times.py
