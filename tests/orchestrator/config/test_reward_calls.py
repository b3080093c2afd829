"""What `validate` reads of a reward function's parameters, beside what TRL and the rows hold for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.generators.config_world import furnish, problem, write_rows

FUNCTIONS = """\
import torch_of_mine  # never imported here
from grpo_orch.rewards import in_workers

def judged(completions, answer, **kwargs): ...
def misspelled(completions, answr, **kwargs): ...
def by_key(*, completions, solution, weight=1.0, **kwargs): ...
def by_place(completions, answer, /, **kwargs): ...
def narrow(prompts, completions, completion_ids, trainer_state, log_extra, log_metric): ...
def exact(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, question, answer): ...
async def waits(completions, solution, **kwargs): ...
def played(completions, environments, **kwargs): ...
def own_prompt(completions, prompt, **kwargs): ...

@in_workers()
def scored(text, answer, prompt): ...

@in_workers(limit_s=3.0)
def scored_by(text, key): ...

def decorated(function): ...

@decorated
def hidden(anything): ...
"""
ROW = {"prompt": "1 + 1", "question": "?", "answer": "2"}
COLUMNS = "has columns question, answer; expected a column, a default, or a value in trainer.reward_args"


def asked(folder: Path, function: str, *changes: tuple[str, str]) -> str:
    """The only problem of a run.yaml with that reward function; empty where there is none."""
    if not (folder / "run.yaml").exists():
        furnish(folder)
        write_rows(folder, *[ROW] * 8)
    (folder / "my.py").write_text(FUNCTIONS)
    return problem(folder, ("[rewards.digit_share]", f"[{function}]"), *changes)


@pytest.mark.parametrize("function", ["my.judged", "my.exact", "my.scored", "my.hidden"])
def test_function_that_trl_can_call_is_taken(tmp_path: Path, function: str) -> None:
    assert asked(tmp_path, function) == ""


@pytest.mark.parametrize(
    ("function", "parameter", "near"),
    [
        ("misspelled", "answr", '; did you mean "answer"?'),
        ("by_key", "solution", '; did you mean "question"?'),
        ("waits", "solution", '; did you mean "question"?'),
        ("played", "environments", ""),
        ("own_prompt", "prompt", ""),
        ("scored_by", "key", ""),
    ],
)
def test_parameter_without_a_value_is_named(tmp_path: Path, function: str, parameter: str, near: str) -> None:
    assert asked(tmp_path, f"my.{function}") == (
        f"trainer.reward_funcs[0]: parameter {parameter} of {function} is not passed by TRL, and "
        f"trainer.dataset {COLUMNS}{near}"
    )


def test_function_without_kwargs_lacks_a_column(tmp_path: Path) -> None:
    assert asked(tmp_path, "my.narrow") == (
        "trainer.reward_funcs[0]: narrow does not accept question, which TRL passes; add a **kwargs parameter"
    )


def test_parameter_by_position_alone_is_refused(tmp_path: Path) -> None:
    assert asked(tmp_path, "my.by_place") == (
        "trainer.reward_funcs[0]: by_place accepts completions only by position, but TRL passes it by name"
        "; remove the `/`"
    )


def test_missing_function_is_named(tmp_path: Path) -> None:
    assert asked(tmp_path, "my.judge") == (
        "trainer.reward_funcs[0]: my.py does not define judge; expected a function of that name; "
        'did you mean "judged"?'
    )


@pytest.mark.parametrize(
    ("function", "change"),
    [
        ("my.by_key", ("grpo:\n", "  reward_args: {by_key: {solution: 3}}\ngrpo:\n")),
        ("my.scored_by", ("grpo:\n", "  reward_args: {scored_by: {key: 3}}\ngrpo:\n")),
        ("my.misspelled", ("dataset: prompts.jsonl", "dataset: someone/on-the-hub")),
        (
            "my.misspelled",
            ("dataset: prompts.jsonl", "dataset: {path: prompts.jsonl, prompt: rewards.digit_share}"),
        ),
        ("my.misspelled", ("dataset: prompts.jsonl", "dataset: prompts.jsonl\n  setup: python rows.py")),
    ],
)
def test_value_from_elsewhere_is_not_judged(tmp_path: Path, function: str, change: tuple[str, str]) -> None:
    assert asked(tmp_path, function, change) == ""


def test_column_that_only_training_rows_have_is_named(tmp_path: Path) -> None:
    furnish(tmp_path)
    write_rows(tmp_path, *[ROW] * 8)
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1", "question": "?"}\n')
    held_out = ("dataset: prompts.jsonl", "dataset: prompts.jsonl\n  eval_dataset: held_out.jsonl")
    assert "and trainer.eval_dataset has columns question;" in asked(tmp_path, "my.judged", held_out)


def test_no_column_is_passed_where_they_are_dropped(tmp_path: Path) -> None:
    dropped = ("  beta: 0.02", "  beta: 0.02\n  remove_unused_columns: true")
    assert "trainer.dataset has only the column prompt;" in asked(tmp_path, "my.judged", dropped)
    assert asked(tmp_path, "my.narrow", dropped) == ""


GOOD, BAD = "def reward(completions, **kwargs): ...", "def reward(completions): ..."


@pytest.mark.parametrize(
    "source",
    [
        "for reward in (len,):\n  pass",
        "import contextlib\nwith contextlib.nullcontext(len) as reward:\n  pass",
        "if reward := len:\n  pass",
        f"match 1:\n  case 1:\n    {GOOD}",
        "for name in ('reward', 'other'):\n  globals()[name] = len",
        "exec('def reward(completions, **kwargs): ...')",
        "import sys\nsetattr(sys.modules[__name__], 'reward', len)",
        f"def make():\n  global reward\n  {GOOD}",
        f"try:\n  import fast\n  {GOOD}\nexcept ImportError:\n  {BAD}",
        f"from typing import TYPE_CHECKING\n{GOOD}\nif TYPE_CHECKING:\n  {BAD}",
        "try:\n  from fast import reward\nexcept ImportError:\n  from slow import reward",
        "from trl.rewards import think_format_reward as reward",  # which this machine need not have
        "from shapes import reward",
        f"if 1: pass\n{'elif 1: pass' + chr(10)}" * 1000 + GOOD,
        f"x = {'-' * 100_000}1\n{GOOD}",
    ],
)
def test_function_that_only_python_can_find_is_left_to_it(tmp_path: Path, source: str) -> None:
    (tmp_path / "shapes.py").write_text(source)
    assert asked(tmp_path, "shapes.reward") == ""


@pytest.mark.parametrize("source", [BAD, f"if 1:\n  {BAD}\nelse:\n  {BAD}", f"from narrow import reward\n{BAD}"])
def test_function_that_fits_nowhere_is_refused(tmp_path: Path, source: str) -> None:
    (tmp_path / "narrow.py").write_text(BAD)
    (tmp_path / "shapes.py").write_text(source)
    assert "add a **kwargs parameter" in asked(tmp_path, "shapes.reward")
