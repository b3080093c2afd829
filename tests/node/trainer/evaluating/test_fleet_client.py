"""TRL's calls of its client, and its own evaluation in one batch: the metrics are those of one call at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from grpo_orch.checkpoint.records.rollouts import Rollout
from grpo_orch.policies.serving.wire import Completion
from grpo_orch.tasks.completions.rollout_source import RolloutSource
from grpo_orch.tasks.trl.fleet_client import NO_PROMPT, FleetClient
from tests.node.trainer.rig import open_rig

OF_TIME = ("runtime", "per_second")


def evaluated(folder: Path, tiny: Path, *, foresees: bool) -> tuple[list[int], set[Any], dict[str, float]]:
    """Sizes of the batches that two evaluations asked for, their requests, and TRL's metrics of the second."""
    grpo = {
        "per_device_eval_batch_size": 8,
        "num_generations_eval": 4,
        "temperature": 1e-4,
    }  # seeds decide nothing
    with open_rig(folder, tiny, grpo=grpo, evaluates=True) as rig:
        trainer = rig.assemble()
        assert trainer.fleet.foresees
        trainer.fleet.foresees = foresees
        trainer.evaluate()
        found = trainer.evaluate()
        kept = {name: value for name, value in found.items() if not name.endswith(OF_TIME)}
        return rig.gateway.batches, set(rig.gateway.asked), kept


def test_an_evaluation_is_one_batch_and_computes_the_same(tiny: Path, tmp_path: Path) -> None:
    sizes, asked, found = evaluated(tmp_path / "one", tiny, foresees=True)
    sizes_before, _, found_before = evaluated(tmp_path / "many", tiny, foresees=False)
    assert (sizes, sizes_before) == ([16] * 2, [8] * 4)
    assert len(asked) == 2 * 16, "the second evaluation has seeds of its own"
    assert found == found_before
    assert "eval_reward" in found


def client_of(complete: Callable[..., Rollout], *, training: bool) -> FleetClient:
    """A client whose completions come from a function."""
    client = FleetClient(cast("RolloutSource", SimpleNamespace(complete=complete)))
    state, model = SimpleNamespace(global_step=0), SimpleNamespace(training=training)
    client.attach(SimpleNamespace(state=state, model=model, eos_token_ids=[2]), None, 0)
    return client


def test_rows_of_one_prompt_get_different_completions() -> None:
    calls: list[list[list[int]]] = []

    def complete(_version: object, prompts: list[list[int]], samples: int, *_: Any, **__: Any) -> Rollout:
        calls.append(prompts)
        made = [
            Completion(index, [len(calls), index, *prompts[index // samples]], [0.0] * 3, "stop", "0-0", "n")
            for index in range(len(prompts) * samples)
        ]
        return Rollout(1, "0-0", "0-0", 0, "", made)

    client = client_of(complete, training=False)

    def ids(*prompts: int) -> Any:
        return client.generate([[prompt] for prompt in prompts], n=2)["completion_ids"]

    client.foresee([[7], [8], [7]])
    assert ids(8, 7) == [[1, 2, 8], [1, 3, 8], [1, 0, 7], [1, 1, 7]]
    assert ids(7) == [[1, 4, 7], [1, 5, 7]]
    assert ids(7) == [[1, 0, 7], [1, 1, 7]], "the loop fills its last batch with the first rows"
    assert ids(7, 9)[2:] == [[2, 2, 9], [2, 3, 9]], "a call with another prompt is made when it comes"
    client.foresee([])
    assert ids(8) == [[3, 0, 8], [3, 1, 8]]
    assert calls == [[[7], [8], [7]], [[7], [9]], [[8]]]


def test_an_empty_prompt_is_asked_for_and_none_is_not() -> None:
    made = [Completion(n, [5, n], [-0.5, -0.5], "stop", "0-0", "node") for n in range(2)]
    asked: list[list[int]] = []

    def complete(_version: object, prompts: list[list[int]], *_: Any, **__: Any) -> Rollout:
        asked.extend(prompts)
        return Rollout(1, "0-0", "0-0", 0, "", made)

    found = client_of(complete, training=True).generate([NO_PROMPT, [], [7], NO_PROMPT])
    assert asked == [[], [7]]
    assert found["completion_ids"] == [[], [5, 0], [5, 1], []]
    assert [len(one) for one in found["logprobs"]] == [0, 2, 2, 0]
