"""Reward functions that score one completion, made into TRL's kind, which scores many: in processes that are
killed where one takes too long."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import structlog

from tasks.rewards.pool import Answer, Limits, NoWorker, Pool
from tasks.rewards.texts import shown, text_of

log = structlog.get_logger()

LIMIT_S = 5.0
WALL_FACTOR = 5.0  # what waits for something takes no CPU time; on a busy machine work takes a few times as long
MEMORY_BYTES = 2 << 30
LOGGED_MAX = 5  # failures of one call that are written out
# What Python and libraries of linear algebra need; tokens and keys are left behind.
ENVIRONMENT = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "PYTHONIOENCODING",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
    "HF_HOME",
    "TMPDIR",
)

NOTHING: Mapping[str, Any] = MappingProxyType({})

Score = Callable[..., float | None]
Reward = Callable[..., list[float | None]]


class RewardRaised(Exception):
    """A function that scores one completion raised; the message names both."""


def in_workers(
    *,
    limit_s: float = LIMIT_S,
    failure: float | None = 0.0,
    memory_bytes: int = MEMORY_BYTES,
    needs: Sequence[str] = (),
    name: str = "",
) -> Callable[[Score], Reward]:
    """Make a reward function in TRL's signature of a module's function that scores one completion.

    The function takes the completion's text first; its other parameters are columns of the dataset, `prompt`, or
    arguments from run.yaml. Workers import its module by name.

    Args:
        limit_s: CPU time for one completion; five times as long by the clock.
        failure: the score of a completion that took more time or memory, or ended the worker. It should be the
            score of a wrong answer: with None a hang would be better for the model than being wrong.
        memory_bytes: address space of a worker.
        needs: modules that a worker imports before its first completion, so that it is not charged for it.
        name: what failures are logged under, where it is not the function's own.
    """

    def wrap(score: Score) -> Reward:
        text, *others = inspect.signature(score).parameters.values()

        @functools.wraps(score)
        def reward(
            prompts: Sequence[Any], completions: Sequence[Any], fixed: Mapping[str, Any] = NOTHING, **told: Any
        ) -> list[float | None]:
            columns = {"prompt": prompts, **told}
            for one in others:
                if one.default is one.empty and one.name not in fixed.keys() | columns.keys():
                    raise TypeError(
                        f"{score.__name__} needs a column or an argument `{one.name}`, and there is none"
                    )
            per_row = [one.name for one in others if one.name in columns.keys() - fixed.keys()]
            samples = [
                {text.name: text_of(one), **fixed, **{column: columns[column][i] for column in per_row}}
                for i, one in enumerate(completions)
            ]
            pool = _pool(score.__module__, score.__qualname__, memory_bytes)
            limits, log_metric = Limits(limit_s, WALL_FACTOR * limit_s), told.get("log_metric")
            answers = answered(name or score.__name__, pool, samples, limits, completions, log_metric)
            return [one.value if one.ending == "scored" else failure for one in answers]

        reward.score, reward.needs = score, needs  # type: ignore[attr-defined]  # where the worker finds them
        return reward

    return wrap


def with_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the reward function with arguments from run.yaml, which stand before columns of the same name.

    Raises TypeError for one that the function does not name.
    """
    score = getattr(function, "score", function)
    for name in arguments:
        if name not in inspect.signature(score).parameters:
            raise TypeError(f"{function.__name__} takes no argument `{name}`")
    given = {"fixed": arguments} if hasattr(function, "score") else dict(arguments)

    @functools.wraps(function)  # it copies what the function says of itself, too
    def reward(**told: Any) -> Any:
        return function(**told | given)

    if hasattr(function, "readable"):
        reward.readable = functools.partial(_with, function.readable, given)  # type: ignore[attr-defined]  # `says`

    @functools.wraps(function)
    async def awaited(**told: Any) -> Any:
        return await function(**told | given)

    return awaited if inspect.iscoroutinefunction(function) else reward


def _with(function: Callable[..., Any], given: Mapping[str, Any], **told: Any) -> Any:
    return function(**told | dict(given))


def answered(
    name: str,
    pool: Pool,
    samples: Sequence[Any],
    limits: Limits,
    completions: Sequence[Any],
    log_metric: Callable[[str, float], None] | None,
) -> list[Answer]:
    """Return what became of each sample; those that failed are named in the log. Raises RewardRaised, NoWorker."""
    try:
        answers = pool.map(samples, limits)
    except NoWorker as error:
        raise NoWorker(f"{name}: {error}") from None
    for index, answer in enumerate(answers):
        if answer.ending == "raised":
            raise RewardRaised(f"{name}: {answer.why}; sample {index}, {shown(text_of(completions[index]))}")
    failed = [index for index, answer in enumerate(answers) if answer.ending == "failed"]
    for index in failed[:LOGGED_MAX]:
        text = text_of(completions[index])
        said = {"sample": index, "why": answers[index].why, "characters": len(text), "completion": shown(text)}
        log.warning("reward_failed", function=name, **said)
    if failed:
        log.warning("rewards_failed", function=name, failed=len(failed), of=len(answers))
        if log_metric is not None:
            log_metric(f"reward_failures/{name}", float(len(failed)))
    return answers


@functools.cache
def _pool(module: str, name: str, memory_bytes: int) -> Pool:
    return Pool(functools.partial(_start, module, name, memory_bytes))


def _start(module: str, name: str, memory_bytes: int) -> subprocess.Popen[bytes]:
    env = {key: os.environ[key] for key in ENVIRONMENT if key in os.environ}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    env["PYTHONHASHSEED"] = "0"  # what depends on the order of a set is the same in every worker
    argv = [sys.executable, "-m", "tasks.rewards.worker", module, name, str(memory_bytes)]
    return subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
