"""reasoning-gym's problems, each made of its number, and answers by the rules that it brings for them.

A problem is not handed over but made once more where an answer is scored: what its rule looks at is often no JSON.
Some of its generators go through sets of texts, so that both happen under one `PYTHONHASHSEED`.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tasks.rewards.in_workers import in_workers
from tasks.rewards.says import readable_by
from tasks.rewards.texts import answer_of, element, text_of

COLUMN = "problem"  # JSON: task, arguments, number, and a digest of what was made of them
LIMIT_S = 20.0  # making one takes up to 2 s, of `futoshiki` and `knight_swap`

# The rules of these read an answer by Python's `eval`, or by sympy's, which is the same: what a model wrote would
# run. They get answers in the characters of such answers alone, in which no name but these can be called.
_LIST = re.compile(r"[\sA-EQ_\d,\[\]'\"-]*", re.ASCII)
_WORDS = "sin|cos|tan|asin|acos|atan|sinh|cosh|tanh|exp|log|ln|sqrt|pi|Integral|[A-Za-z]"
_FORMULA = re.compile(
    rf"(?:[\s\d+\-*/^(),]|\.(?!\s*[A-Za-z_])|(?<![A-Za-z_.])(?:{_WORDS})(?![A-Za-z_]))*", re.ASCII
)
EVALUATED = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _LIST),
    **dict.fromkeys(("countdown", "puzzle24", "polynomial_multiplication"), _FORMULA),
    **dict.fromkeys(("intermediate_integration", "simple_integration"), _FORMULA),
}


class NoProblems(Exception):
    """What is asked for is not made; the message says why."""


def reasoning_gym_readable(
    completions: Sequence[Any], tag: str | None = "answer", opened: bool = False, **_: Any
) -> list[bool]:
    """Whether each has an answer where `reasoning_gym_reward` looks for one."""
    return [_found(text_of(one), tag, opened) is not None for one in completions]


@readable_by(reasoning_gym_readable)
def reasoning_gym_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    tag: str | None = "answer",
    opened: bool = False,
    **columns: Any,
) -> list[float | None]:
    """The score, 0 to 1, that reasoning-gym's rule for the problem gives the answer; None in rows of other data.

    An answer with which the rule raises has 0.

    Args:
        tag: where the answer is, after the thoughts: in the last `<tag>...</tag>`. None: all that follows them.
        opened: the prompt ends with `<think>`: without `</think>` there is no answer.

    Raises TypeError without the column `problem`, which rows of `{reasoning_gym: TASK}` have; RewardRaised where
    the installed version makes another problem than was asked.
    """
    if COLUMN not in columns:
        message = "needs rows of a dataset {reasoning_gym: TASK}, which have a column"
        raise TypeError(f"reasoning_gym_reward {message} `{COLUMN}`")
    answers = [_found(text_of(one), tag, opened) or "" for one in completions]
    return _scored(prompts, answers, problem=columns[COLUMN], log_metric=columns.get("log_metric"))


@in_workers(limit_s=LIMIT_S, needs=("reasoning_gym",), name="reasoning_gym_reward")
def _scored(answer: str, problem: str | None) -> float | None:
    """As `reasoning_gym_reward`, of one answer; an empty one is none."""
    if problem is None:
        return None
    told = json.loads(problem)
    task = told["task"]
    made, entry = _entry(task, json.dumps(told["args"]), told["number"])
    if told["digest"] != _digest(entry):
        raise ValueError(f"reasoning-gym makes another problem {told['number']} of {task} here than was asked")
    try:
        return float(made.score_answer(_plain(task, answer), copy.deepcopy(entry)))
    except MemoryError:
        raise
    except (Exception, SystemExit):  # noqa: BLE001  # its rules may raise anything at what a model wrote
        return 0.0


def made_problems(task: str, args: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a task, with `question`, `answer` and `problem`. Raises NoProblems.

    They are made in a process in which texts have the hashes that they have in the workers of the reward.
    """
    env = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    argv = [sys.executable, "-c", "from tasks.rewards import reasoning; reasoning.main()", task, json.dumps(args)]
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise NoProblems(f"making problems of {task} ended with {done.returncode}; the lines above say why")
    made = json.loads(done.stdout)
    if "wrong" in made:
        raise NoProblems(" ".join(made["wrong"].split()))
    rows: list[dict[str, Any]] = made["rows"]
    return rows


def main() -> None:
    """Print the problems of the command line's task and JSON of arguments, and nothing else."""
    task, args = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):  # some generators print dots
        made = _made(task, json.loads(args))
    print(json.dumps(made))


def _made(task: str, args: dict[str, Any]) -> dict[str, Any]:
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = " or ".join(difflib.get_close_matches(task, DATASETS, 2))
        return {"wrong": f"reasoning-gym has no task {task!r}{near and f'; did you mean {near}?'}"}
    if task == "composite":
        return {"wrong": "expected one task; of several make a list of datasets, each with its `weight`"}
    try:
        made = _dataset(task, json.dumps(args))
        entries = [made[number] for number in range(len(made))]
    except Exception as error:  # noqa: BLE001  # assertions about arguments, and whatever a generator runs into
        return {"wrong": f"{task}: {type(error).__name__}: {error}"}
    return {"rows": [_row(task, args, number, entry) for number, entry in enumerate(entries)]}


def _row(task: str, args: dict[str, Any], number: int, entry: dict[str, Any]) -> dict[str, Any]:
    told = {"task": task, "args": args, "number": number, "digest": _digest(entry)}
    return {"question": entry["question"], "answer": entry["answer"], COLUMN: json.dumps(told)}


def _found(text: str, tag: str | None, opened: bool) -> str | None:
    answer = answer_of(text, opened)
    inside = element(answer, tag) if tag is not None else answer
    return (inside or "").strip() or None


def _plain(task: str, answer: str) -> str | None:
    """The answer, if there is one and nothing in it would run."""
    form = EVALUATED.get(task)
    return answer if answer and (form is None or form.fullmatch(answer)) else None


@functools.lru_cache(maxsize=256)
def _entry(task: str, args: str, number: int) -> tuple[Any, dict[str, Any]]:
    made = _dataset(task, args)
    return made, made[number]


@functools.lru_cache(maxsize=16)
def _dataset(task: str, args: str) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(task, **json.loads(args))


def _digest(entry: dict[str, Any]) -> str:
    return hashlib.blake2b(f"{entry['question']}\0{entry['answer']}".encode(), digest_size=8).hexdigest()
