"""The evaluator with what users bring: environments that score, and functions that hang where they say what can be
read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_orch.policies.evaluation.evaluation_spec import as_run
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.vocabulary import BASE, Evaluation, Subject
from grpo_orch.policies.serving.wire import Batch, Completion, CompletionRequest, PolicyRef
from grpo_orch.rewards import readable_by
from grpo_orch.tasks.completions.gateway_client import Generated
from grpo_orch.tasks.evaluating.assemble_evaluator import InPieces, is_cut, readable_by_judge
from grpo_orch.tasks.rewards.user_calls import BadReward
from grpo_orch.tasks.trl.trl_grpo import Made
from tests.budget import HANG_S
from tests.node.trainer.evaluating import test_evaluator as evaluator
from tests.node.trainer.rig import PROMPTS, Rig, open_rig, run_spec


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, chatty: Path) -> Iterator[Rig]:
    """An evaluation of the base model of a run whose environment scores, beside a function."""
    grpo = {"max_completion_length": 24, "max_tool_calling_iterations": 3}
    parent = run_spec(
        "file:///nowhere",
        chatty,
        grpo=grpo,
        dataset="chats.jsonl",
        reward="rig_tools.share_of_calls",
        trainer={"environment_factory": "rig_tools.Ladder"},
        replicas=0,
    )
    folder = tmp_path_factory.mktemp("eval")
    of = Evaluation((folder / "parent").as_uri(), (Subject(BASE),))
    with open_rig(folder, chatty, ready=as_run(parent, "", parent.trainer.dataset), evaluation=of) as made:
        yield made


def test_environments_score_is_one_of_the_scores(rig: Rig) -> None:
    assert evaluator.evaluate(rig) == (exit_codes.OK, "evaluated base")
    summary, samples = evaluator.found(rig, BASE)
    assert list(summary.scores) == ["share_of_calls", "Ladder"]
    expected = [row / 10 for row in range(PROMPTS)]  # the model climbs nowhere
    assert [one.scores["Ladder"] for one in samples] == pytest.approx(expected)


def hangs(**_: Any) -> list[bool]:
    return [True for _ in itertools.count()]


def leaves(**_: Any) -> list[bool]:
    raise SystemExit(3)


def takes_all(completions: list[str], **_: Any) -> list[bool]:
    found = [True for _ in completions]
    completions.clear()
    return found


def judged_by(says: Any, timeout_s: float = HANG_S) -> tuple[Any, Made]:
    @readable_by(says)
    def right(completions: list[str], **_: Any) -> list[float]:
        return [1.0 for _ in completions]

    rows = [{"prompt": "a"}, {"prompt": "b"}]
    made = Made(["a", "b"], ["x", "y"], [[5], [6]])
    return SimpleNamespace(rewards={"right": right}, rows=rows, timeout_s=timeout_s), made


@pytest.mark.parametrize(("says", "told"), [(hangs, "timed out"), (leaves, "raised SystemExit: 3")])
def test_judge_of_readability_is_under_the_rules_of_rewards(says: Any, told: str) -> None:
    of, made = judged_by(says, 0.2 if says is hangs else HANG_S)
    with pytest.raises(BadReward, match=f"what right says of which completions can be read {told}"):
        readable_by_judge(of, "right", made)


def test_readability_score_changes_no_sample() -> None:
    of, made = judged_by(takes_all)
    assert readable_by_judge(of, "right", made) == [True, True]
    assert made.completions == ["x", "y"]


@pytest.mark.parametrize(
    ("ids", "kwargs", "cut"),
    [
        ([5, 5, 5, 5], None, True),
        ([5, 5, 5, 1], None, False),
        ([5, 5], {"stop": ["</answer>"]}, False),
        ([5, 5], {"max_tokens": 2}, True),
        ([], None, False),
    ],
)
def test_completion_at_full_length_without_end_is_cut(
    ids: list[int], kwargs: dict[str, Any] | None, cut: bool
) -> None:
    trainer: Any = SimpleNamespace(
        eos_token_ids=[1], args=SimpleNamespace(max_completion_length=4, generation_kwargs=kwargs)
    )
    assert is_cut(trainer, ids) is cut


def test_pieces_are_halved_until_there_is_room_for_them() -> None:
    asked: list[int] = []

    class Small:
        def complete(self, batch: Batch) -> Generated:
            asked.append(len(batch.requests))
            if len(batch.requests) > 2:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
            made = [Completion(one.index, [1], [0.0], "stop", "0-0", "n") for one in batch.requests]
            return Generated(made, 0, 0.0)

    requests = [CompletionRequest(index, [5], 0) for index in range(5)]
    batch = Batch(PolicyRef("0-0", ""), {}, requests, 1.0)
    made = InPieces(Small(), 8).complete(batch).completions  # type: ignore[arg-type]  # a stand-in
    assert [one.index for one in made] == [0, 1, 2, 3, 4]
    assert asked == [5, 4, 2, 2, 1]
