"""reasoning-gym's own problems and rules, over what models may write as an answer."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tasks.rewards import reasoning, reasoning_gym_reward
from tasks.rewards.in_workers import RewardRaised

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")

# Modules that evaluate what they themselves have made, and nothing of an answer.
OWN_EVALUATION = {
    "algorithmic.number_sorting",
    "arithmetic.basic_arithmetic",
    "arithmetic.bitwise_arithmetic",
    "arithmetic.gsm_symbolic",
    "code.codeio",
    "logic.propositional_logic",  # a parser of its own
}
RUNS = {"eval", "exec", "parse_expr", "sympify", "compile", "__import__"}


def rows(task: str, **args: Any) -> list[dict[str, Any]]:
    return reasoning.made_problems(task, args)


def scores(answers: list[str | None], told: dict[str, Any], **more: Any) -> list[float | None]:
    texts = [f"<think>?</think> It is <answer> {one}\n</answer>." for one in answers]
    problems = [told["problem"]] * len(texts)
    return reasoning_gym_reward([told["question"]] * len(texts), texts, problem=problems, **more)


def test_its_own_answers_are_right_and_others_are_not() -> None:
    made = [*rows("leg_counting", seed=3, size=2, max_animals=4), *rows("countdown", seed=3, size=2)]
    right = [f"<answer>{row['answer']}</answer>" for row in made]
    problems = [row["problem"] for row in made]
    assert reasoning_gym_reward(["?"] * 4, right, problem=problems) == [1.0] * 4
    thoughts = "<think><answer>0</answer></think>"
    chats = [[{"role": "assistant", "content": thoughts + text}] for text in right]
    assert reasoning_gym_reward(["?"] * 4, chats, problem=problems) == [1.0] * 4
    wrong = ["<answer>-1</answer>", "", "<think>" + right[2], "no"]
    assert reasoning_gym_reward(["?"] * 4, wrong, problem=problems) == [0.0, 0.0, 0.01, 0.01]  # its rule's least
    bare = [str(row["answer"]) for row in made]
    assert reasoning_gym_reward(["?"] * 4, bare, tag=None, problem=problems) == [1.0] * 4
    assert reasoning_gym_reward(["?"] * 2, right[:2], problem=[None, problems[1]]) == [None, 1.0]
    assert reasoning.reasoning_gym_readable(wrong) == [True, False, False, False]


@pytest.mark.parametrize("task", sorted(reasoning.EVALUATED))
def test_no_answer_is_run(task: str, tmp_path: Path) -> None:
    told = reasoning._made(task, {"seed": 7, "size": 1})["rows"][0]
    run = f"__import__('pathlib').Path({str(tmp_path / 'run')!r}).touch()"
    called = "exec(" + "+".join(f"chr({ord(one)})" for one in run) + ")"  # in which there is no quote
    for answer in (run, f"[{run}]", f"[[{run}]]", called, f"x+{called}", f"[x for x in [{run}]]"):
        assert reasoning._scored.score(answer, told["problem"]) < 0.1  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("task", sorted(reasoning.EVALUATED))
def test_right_answers_are_in_the_characters_that_are_let_through(task: str) -> None:
    for row in reasoning._made(task, {"seed": 11, "size": 6})["rows"]:
        assert reasoning._plain(task, row["answer"].strip())
        assert reasoning._scored.score(row["answer"].strip(), row["problem"]) == 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("lists", ["['A', 'B', 'E']", "[[0, 1], [1, 0]]", "[['Q', '_']]", '["-1"]'])
def test_lists_are_let_through_as_its_rules_read_them(lists: str) -> None:
    assert reasoning._plain("n_queens", lists)


def test_every_rule_that_could_run_an_answer_is_known() -> None:
    """Of the installed version; what it takes to look at a new one."""
    from reasoning_gym.factory import DATASETS

    found = set()
    for task, (made_by, _) in DATASETS.items():
        source = inspect.getsource(importlib.import_module(made_by.__module__))
        calls = [one.func for one in ast.walk(ast.parse(source)) if isinstance(one, ast.Call)]
        names = {one.id if isinstance(one, ast.Name) else getattr(one, "attr", "") for one in calls}
        parts = made_by.__module__.split(".")[1:]
        if names & RUNS - {"compile"} and not OWN_EVALUATION & {".".join(parts[:2])}:
            found.add(task)
    assert found == set(reasoning.EVALUATED)


def test_an_answer_that_its_rule_cannot_read_is_wrong() -> None:
    told = rows("prime_factorization", seed=1, size=1)[0]
    assert scores(["((", "\ud800\0", told["answer"]], told) == [0.0, 0.0, 1.0]


def test_problems_are_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though some generators go through sets of texts, whose order is another one in each."""
    made = []
    for hash_seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        made.append(rows("word_ladder", seed=5, size=3))
    assert made[0] == made[1]


def test_a_problem_that_is_made_otherwise_now_is_named() -> None:
    told = rows("leg_counting", seed=1, size=1)[0]
    other = json.loads(told["problem"]) | {"digest": "0"}
    with pytest.raises(RewardRaised, match="makes another problem 0 of leg_counting"):
        scores(["4"], {**told, "problem": json.dumps(other)})
    with pytest.raises(TypeError, match="needs rows of a dataset"):
        reasoning_gym_reward(["?"], ["4"])


@pytest.mark.parametrize(
    ("task", "args", "says"),
    [
        ("leg_countin", {}, "has no task 'leg_countin'; did you mean leg_counting"),
        ("composite", {}, "expected one task"),
        ("leg_counting", {"animals": 3}, "leg_counting: TypeError: .*'animals'"),
        ("leg_counting", {"min_animals": 9, "max_animals": 2}, "max_animals must be >= min_animals"),
    ],
)
def test_what_it_does_not_make_is_said(task: str, args: dict[str, Any], says: str) -> None:
    assert re.search(says, reasoning._made(task, {"seed": 1, **args})["wrong"])


def test_a_mistake_comes_out_of_the_process_in_one_line() -> None:
    with pytest.raises(reasoning.NoProblems, match=r"^reasoning-gym has no task 'leg_countin'; .*$"):
        rows("leg_countin", seed=1)
