"""Turn functions that score one completion into TRL reward functions, run in killable worker processes."""

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

from grpo_orch.tasks.rewards.pool import Answer, Limits, NoWorker, Pool
from grpo_orch.tasks.rewards.texts import shown, text_of

log = structlog.get_logger()

LIMIT_S = 5.0
WALL_FACTOR = 5.0  # wall time per CPU time: waiting takes no CPU time, and a busy machine is a few times slower
MEMORY_BYTES = 2 << 30
LOGGED_MAX = 5  # failures of one call that are logged individually
# Variables that Python and linear-algebra libraries need, without tokens and keys.
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
    """A function that scores one completion raised. The message names the function and the completion."""


def in_workers(
    *,
    limit_s: float = LIMIT_S,
    failure: float | None = 0.0,
    memory_bytes: int = MEMORY_BYTES,
    needs: Sequence[str] = (),
    name: str = "",
) -> Callable[[Score], Reward]:
    """Turn a module-level function that scores one completion into a reward function in TRL's signature.

    The function's first parameter is the completion's text; the others are dataset columns, `prompt`, or arguments
    from run.yaml. Workers import its module by name.

    Args:
        limit_s: CPU time for one completion; the wall time limit is five times this.
        failure: score of a completion that exceeded its time or memory, or ended the worker. Use the score of a
            wrong answer: with None, hanging would pay the model better than being wrong.
        memory_bytes: address space of a worker.
        needs: modules a worker imports at its start, outside the time limit of its first completion.
        name: name in the log instead of the function's own.
    """

    def wrap(score: Score) -> Reward:
        text, *parameters = inspect.signature(score).parameters.values()

        @functools.wraps(score)
        def reward(
            prompts: Sequence[Any], completions: Sequence[Any], fixed: Mapping[str, Any] = NOTHING, **others: Any
        ) -> list[float | None]:
            columns = {"prompt": prompts, **others}
            for parameter in parameters:
                is_required = parameter.default is parameter.empty
                if is_required and parameter.name not in fixed.keys() | columns.keys():
                    raise TypeError(f"{score.__name__} needs a column or an argument `{parameter.name}`")
            names = [parameter.name for parameter in parameters]
            per_row = [column for column in names if column in columns.keys() - fixed.keys()]
            samples = [
                {text.name: text_of(completion), **fixed, **{column: columns[column][i] for column in per_row}}
                for i, completion in enumerate(completions)
            ]
            pool = _pool(score.__module__, score.__qualname__, memory_bytes)
            limits, log_metric = Limits(limit_s, WALL_FACTOR * limit_s), others.get("log_metric")
            answers = run_samples(name or score.__name__, pool, samples, limits, completions, log_metric)
            return [answer.value if answer.ending == "scored" else failure for answer in answers]

        reward.score, reward.needs = score, needs  # type: ignore[attr-defined]  # read by the worker
        return reward

    return wrap


def with_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Bind arguments from run.yaml to a reward function. They take precedence over columns of the same name.

    Raises TypeError for an argument that is not a parameter of the function.
    """
    score = getattr(function, "score", function)
    for name in arguments:
        if name not in inspect.signature(score).parameters:
            raise TypeError(f"{function.__name__} takes no argument `{name}`")
    bound = {"fixed": arguments} if hasattr(function, "score") else dict(arguments)

    @functools.wraps(function)  # copies its attributes, too
    def reward(**columns: Any) -> Any:
        return function(**columns | bound)

    @functools.wraps(function)
    async def reward_async(**columns: Any) -> Any:
        return await function(**columns | bound)

    made: Any = reward_async if inspect.iscoroutinefunction(function) else reward
    if hasattr(function, "readable"):
        readable = function.readable
        made.readable = lambda **columns: readable(**columns | bound)
    return made  # type: ignore[no-any-return]


def run_samples(
    name: str,
    pool: Pool,
    samples: Sequence[Any],
    limits: Limits,
    completions: Sequence[Any],
    log_metric: Callable[[str, float], None] | None,
) -> list[Answer]:
    """Return the answer to each sample, and log the samples that failed. Raises RewardRaised, NoWorker."""
    try:
        answers = pool.map(samples, limits)
    except NoWorker as error:
        raise NoWorker(f"{name}: {error}") from None
    for index, answer in enumerate(answers):
        if answer.ending == "raised":
            raise RewardRaised(f"{name}: {answer.reason}; sample {index}, {shown(text_of(completions[index]))}")
    failed = [index for index, answer in enumerate(answers) if answer.ending == "failed"]
    for index in failed[:LOGGED_MAX]:
        text = text_of(completions[index])
        fields = {
            "sample": index,
            "reason": answers[index].reason,
            "characters": len(text),
            "completion": shown(text),
        }
        log.warning("reward_failed", function=name, **fields)
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
    env["PYTHONHASHSEED"] = "0"  # every worker iterates a set in the same order
    argv = [sys.executable, "-m", "grpo_orch.tasks.rewards.reward_worker", module, name, str(memory_bytes)]
    return subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
