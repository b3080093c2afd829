"""Handle reward functions and tools that raise, hang, or return invalid scores.

To find the prompt at fault, a failed reward function is called again for each prompt's completions separately. A
group is never split, since a function may compare the completions within it. Depending on `policies.on_bad_reward`
the failure ends the run, or those completions get no score from this function.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import inspect
import itertools
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import structlog

from grpo_orch.policies.model.spec import OnBadReward
from grpo_orch.tasks.rewards.texts import shown, text_of

log = structlog.get_logger()

GRACE_S = 60.0  # for Python to act on an interrupt; C code, such as a regular expression, may never return
Scores = list[float | None]
FAULTS = (Exception, SystemExit)  # of the user's code: its `sys.exit` must not end the run
NOT_SCORES = (Mapping, Set, str, bytes)  # iterables whose elements are not scores in the completions' order


class BadReward(Exception):
    """A reward function is at fault. The one-line message names the function and the prompt."""


class RewardTimedOut(BaseException):
    """Raised inside a function that hangs. A BaseException: its own `except Exception` must not catch it."""


def guarded(
    function: Callable[..., Any],
    name: str,
    rule: OnBadReward,
    timeout_s: float,
    passes: Callable[[BaseException], bool],
) -> Callable[..., Any]:
    """Wrap a reward function so that its errors, timeouts and invalid scores follow `rule`.

    Under the rule `fail` the wrapper raises BadReward.

    Args:
        name: the function's import path.
        timeout_s: limit of one call.
        passes: returns True for an error that is not the function's fault; it is raised unchanged.
    """

    @functools.wraps(function)
    def reward(**arguments: Any) -> Scores:
        def call(arguments: dict[str, Any], timeout_s: float) -> Scores:
            with interrupted(timeout_s, name):
                return _checked_scores(call_alone(function, arguments), arguments, name, rule)

        try:
            return call(arguments, timeout_s)
        except (RewardTimedOut, *FAULTS) as error:
            if isinstance(error, BadReward) or passes(error):
                raise
            return _score_by_group(arguments, error, call, name, rule, timeout_s, passes)

    @functools.wraps(function)
    async def reward_async(**arguments: Any) -> Scores:
        try:
            values = await asyncio.wait_for(_await_contained(function, arguments), timeout_s)
            return _checked_scores(values, arguments, name, rule)
        except Exception as error:
            if isinstance(error, BadReward) or passes(error):
                raise
            return _no_scores(arguments, error, name, rule)

    return reward_async if inspect.iscoroutinefunction(function) else reward


def _score_by_group(
    arguments: dict[str, Any],
    error: BaseException,
    call: Callable[[dict[str, Any], float], Scores],
    name: str,
    rule: OnBadReward,
    timeout_s: float,
    passes: Callable[[BaseException], bool],
) -> Scores:
    """Score each prompt's completions separately, with `timeout_s` for all of them together."""
    groups = list(_groups(arguments))
    if len(groups) == 1:
        return _no_scores(arguments, error, name, rule)
    scores: Scores = []
    for group in groups:
        try:
            scores += call(group, timeout_s / len(groups))
        except (RewardTimedOut, *FAULTS) as group_error:
            if isinstance(group_error, BadReward) or passes(group_error):
                raise
            scores += _no_scores(group, group_error, name, rule)
    if rule == "fail":
        raise BadReward(
            f"{name} {describe_error(error)} when called for {len(groups)} prompts, but for no prompt separately"
        )
    return scores


def _groups(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield for each prompt the arguments of its completions."""
    count = len(arguments["prompts"])
    for _, indices in itertools.groupby(range(count), lambda index: arguments["prompts"][index]):
        rows = list(indices)
        group = {
            key: value[rows[0] : rows[-1] + 1] if isinstance(value, list) and len(value) == count else value
            for key, value in arguments.items()
        }
        yield {**group, "log_extra": lambda *_, **__: None}  # it needs a value for every row


def call_alone(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function with copies of the lists. A process that it forks exits on return."""
    own_pid = os.getpid()
    try:
        return function(**_copied(arguments))
    finally:
        if os.getpid() != own_pid:
            os._exit(1)


async def _await_contained(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return await function(**_copied(arguments))
    except SystemExit as error:  # it would end the event loop, and its callers would wait forever
        raise RuntimeError(f"SystemExit: {error}") from error


def _copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, list) else value for key, value in arguments.items()}


def _checked_scores(returned: Any, arguments: dict[str, Any], name: str, rule: OnBadReward) -> Scores:
    """Convert a returned value to scores. Raises TypeError, ValueError unless there is one per completion."""
    if isinstance(returned, NOT_SCORES):
        raise TypeError(f"it returned a {type(returned).__name__}, expected a list")
    values = list(returned)
    count = len(arguments["completions"])
    if len(values) != count:
        raise ValueError(f"it returned {len(values)} values for {count} completions")
    scores = [None if value is None else float(value) for value in values]
    for index, score in enumerate(scores):
        if score is not None and not math.isfinite(score):
            scores[index] = None
            _report(arguments, index, f"returned {score}", name, rule)
    return scores


def _no_scores(arguments: dict[str, Any], error: BaseException, name: str, rule: OnBadReward) -> Scores:
    _report(arguments, 0, describe_error(error), name, rule)
    return [None] * len(arguments["completions"])


def _report(arguments: dict[str, Any], index: int, problem: str, name: str, rule: OnBadReward) -> None:
    """Raise BadReward if the rule is `fail`, else log the problem with its function and sample."""
    prompt, completion = (shown(text_of(arguments[key][index])) for key in ("prompts", "completions"))
    if rule == "fail":
        raise BadReward(f"{name} {problem}, for the prompt {prompt} and the completion {completion}")
    log.warning("bad_reward", function=name, problem=problem, prompt=prompt, completion=completion)
    if (log_metric := arguments.get("log_metric")) is not None:
        log_metric(f"reward_failures/{name.rpartition('.')[2]}", 1.0)


def describe_error(error: BaseException) -> str:
    """Describe an error in one line."""
    if isinstance(error, RewardTimedOut | TimeoutError):
        return "timed out"
    return f"raised {type(error).__name__}: {' '.join(str(error).split())}"


@contextlib.contextmanager
def interrupted(timeout_s: float, name: str) -> Iterator[None]:
    """Raise RewardTimedOut in the `with` block after `timeout_s`. Has no effect outside the main thread.

    If the block is still running GRACE_S later, faulthandler prints tracebacks and ends the process with exit code
    1. Its thread needs no GIL, which the block may hold.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    main_ident = threading.get_ident()
    ended, signalling = threading.Event(), threading.Lock()

    def interrupt(*_: Any) -> None:
        if not ended.is_set():
            raise RewardTimedOut

    def watch() -> None:
        if ended.wait(timeout_s):
            return
        with signalling:
            if not ended.is_set():
                log.warning("reward_timed_out", function=name, timeout_s=timeout_s)
                signal.pthread_kill(main_ident, signal.SIGUSR2)

    faulthandler.dump_traceback_later(timeout_s + GRACE_S, exit=True, file=2)
    before = signal.signal(signal.SIGUSR2, interrupt)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        faulthandler.cancel_dump_traceback_later()
        with signalling:  # `watch` sends no signal from here on
            signal.signal(signal.SIGUSR2, before)


# Tools and environments that raise, hang, or return invalid scores.
#
# TRL passes a tool's exception to the model. A tool that hangs is interrupted as a reward function is, and so are
# an environment's own methods, whose errors only the user can fix.

RESET, REWARD = "reset", "get_reward"


class ToolFailed(BaseException):
    """A tool hung, and the rule is `fail`. A BaseException, since TRL passes an Exception to the model."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How to handle faults of the user's code.

    Args:
        timeout_s: limit of one call.
        passes: returns True for an error that is not the fault of the user's code.
    """

    on_bad_reward: OnBadReward
    timeout_s: float
    passes: Callable[[BaseException], bool]


def guarded_tool(tool: Callable[..., Any], name: str, rule: Rule, where: Callable[[], str] = str) -> Any:
    """Wrap a tool so that a hang raises TimeoutError, which the model sees, or ToolFailed under the rule `fail`.

    A coroutine function is returned unchanged: TRL runs it in another thread, where it cannot be interrupted.

    Args:
        where: returns text to append to error messages.
    """
    if inspect.iscoroutinefunction(tool):
        return tool

    @functools.wraps(tool)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with interrupted(rule.timeout_s, name):
                return tool(*args, **kwargs)
        except (RewardTimedOut, SystemExit) as error:
            problem = f"{name} {describe_error(error)}{where()}"
        if rule.on_bad_reward == "fail":
            raise ToolFailed(problem)
        log.warning("tool_failed", tool=name, problem=problem)
        raise TimeoutError(problem)

    return call


def guarded_factory(factory: Callable[[], Any], name: str, rule: Rule) -> Callable[[], Any]:
    """Wrap an environment factory so that the methods of its environments follow `rule`.

    Args:
        name: the factory's import path.
    """

    @functools.wraps(factory, updated=())
    def make() -> Any:
        environment = factory()
        with contextlib.suppress(AttributeError):  # methods of a class with __slots__ cannot be wrapped
            _guard_environment(environment, name, rule)
        return environment

    return make


def _guard_environment(environment: Any, name: str, rule: Rule) -> None:
    row = {"prompt": "nothing yet"}

    def where() -> str:
        return f", for the prompt {shown(text_of(row['prompt']))}"

    def call(method: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        try:
            with interrupted(rule.timeout_s, name):
                return method(**arguments)
        except (RewardTimedOut, *FAULTS) as error:
            if rule.passes(error):
                raise
            raise BadReward(f"{name}.{method.__name__} {describe_error(error)}{where()}") from error

    reset, reward = environment.reset, getattr(environment, REWARD, None)

    def guarded_reset(**arguments: Any) -> Any:
        row["prompt"] = arguments.get("prompt", "")
        return call(reset, arguments)

    def guarded_reward() -> Any:
        assert reward is not None
        try:
            value = call(reward, {})
            if value is None or math.isfinite(float(value)):
                return value
            raise BadReward(f"{name}.{REWARD} returned {value}{where()}")
        except (BadReward, TypeError, ValueError) as error:
            bad = (
                error
                if isinstance(error, BadReward)
                else BadReward(f"{name}.{REWARD} {describe_error(error)}{where()}")
            )
            if rule.on_bad_reward == "fail":
                raise bad from error
            log.warning("bad_reward", function=f"{name}.{REWARD}", problem=str(bad))
            return None

    environment.reset = guarded_reset
    if reward is not None and not inspect.iscoroutinefunction(reward):
        environment.get_reward = guarded_reward
    for tool, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction):
        if not tool.startswith("_") and tool not in (RESET, REWARD):
            guard = guarded_tool(getattr(environment, tool), f"{name}.{tool}", rule, where)
            setattr(environment, tool, guard)
