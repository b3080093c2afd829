"""What is done about a reward function that raises, hangs, or returns what is no score.

It is named with the prompt that it fails for. That is found by calling it once more for each prompt's completions
alone; a group is never divided, for a function may compare the completions of one. By the run's rule that ends the
run, or those completions have no score of it.
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

from policies.model.spec import OnBadReward
from tasks.rewards.texts import shown, text_of

log = structlog.get_logger()

GRACE_S = 60.0  # in which Python notices an interrupt; code in C may never, as a regular expression's
Scores = list[float | None]
FAULTS = (Exception, SystemExit)  # of the user's code: `sys.exit` in it is no wish to end the run
NO_SCORES = (Mapping, Set, str, bytes)  # whose elements are no scores in the completions' order


class BadReward(Exception):
    """A reward function is at fault; one line names it and the prompt."""


class TooLong(BaseException):
    """Raised within a function that hangs; no `except Exception` of its own takes it."""


def guarded(
    function: Callable[..., Any],
    name: str,
    rule: OnBadReward,
    timeout_s: float,
    passes: Callable[[BaseException], bool],
) -> Callable[..., Any]:
    """Return the reward function, with all that it does looked at. Under the rule `fail` it raises BadReward.

    Args:
        name: its import path.
        timeout_s: for one call.
        passes: whether an error is not the function's, and goes on as it is.
    """

    @functools.wraps(function)
    def reward(**told: Any) -> Scores:
        def call(told: dict[str, Any], within_s: float) -> Scores:
            with interrupted(within_s, name):
                return _scores(call_alone(function, told), told, name, rule)

        try:
            return call(told, timeout_s)
        except (TooLong, *FAULTS) as error:
            if isinstance(error, BadReward) or passes(error):
                raise
            return _by_group(told, error, call, name, rule, timeout_s, passes)

    @functools.wraps(function)
    async def awaited(**told: Any) -> Scores:
        try:
            return _scores(await asyncio.wait_for(_contained(function, told), timeout_s), told, name, rule)
        except Exception as error:
            if isinstance(error, BadReward) or passes(error):
                raise
            return _failed(told, error, name, rule)

    return awaited if inspect.iscoroutinefunction(function) else reward


def _by_group(
    told: dict[str, Any],
    error: BaseException,
    call: Callable[[dict[str, Any], float], Scores],
    name: str,
    rule: OnBadReward,
    timeout_s: float,
    passes: Callable[[BaseException], bool],
) -> Scores:
    """The scores of those prompts whose completions can be scored alone, in as much time once more."""
    groups = list(_groups(told))
    if len(groups) == 1:
        return _failed(told, error, name, rule)
    scores: Scores = []
    for group in groups:
        try:
            scores += call(group, timeout_s / len(groups))
        except (TooLong, *FAULTS) as again:
            if isinstance(again, BadReward) or passes(again):
                raise
            scores += _failed(group, again, name, rule)
    if rule == "fail":
        raise BadReward(f"{name} {said(error)}, for all {len(groups)} prompts at once and for none alone")
    return scores


def _groups(told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What each prompt's completions would be called with alone."""
    count = len(told["prompts"])
    for _, found in itertools.groupby(range(count), lambda index: told["prompts"][index]):
        rows = list(found)
        alone = {
            key: value[rows[0] : rows[-1] + 1] if isinstance(value, list) and len(value) == count else value
            for key, value in told.items()
        }
        yield {**alone, "log_extra": lambda *_, **__: None}  # a column of some of the rows is none


def call_alone(function: Callable[..., Any], told: dict[str, Any]) -> Any:
    """Call it with lists of its own, which it may change; a process that it forked comes no further than here."""
    here = os.getpid()
    try:
        return function(**_copied(told))
    finally:
        if os.getpid() != here:
            os._exit(1)


async def _contained(function: Callable[..., Any], told: dict[str, Any]) -> Any:
    try:
        return await function(**_copied(told))
    except SystemExit as error:  # it would end the loop, and who waits for an answer would wait for ever
        raise RuntimeError(f"SystemExit: {error}") from error


def _copied(told: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, list) else value for key, value in told.items()}


def _scores(found: Any, told: dict[str, Any], name: str, rule: OnBadReward) -> Scores:
    """What a function returned, as numbers. Raises TypeError, ValueError where they are not one for each."""
    if isinstance(found, NO_SCORES):
        raise TypeError(f"it returned a {type(found).__name__}, expected a list")
    values = list(found)
    count = len(told["completions"])
    if len(values) != count:
        raise ValueError(f"it returned {len(values)} values for {count} completions")
    scores = [None if value is None else float(value) for value in values]
    for index, score in enumerate(scores):
        if score is not None and not math.isfinite(score):
            scores[index] = None
            _tell(told, index, f"returned {score}", name, rule)
    return scores


def _failed(told: dict[str, Any], error: BaseException, name: str, rule: OnBadReward) -> Scores:
    _tell(told, 0, said(error), name, rule)
    return [None] * len(told["completions"])


def _tell(told: dict[str, Any], index: int, what: str, name: str, rule: OnBadReward) -> None:
    """Name a function and a sample. Raises BadReward where the rule is `fail`."""
    prompt, completion = (shown(text_of(told[key][index])) for key in ("prompts", "completions"))
    if rule == "fail":
        raise BadReward(f"{name} {what}, for the prompt {prompt} and the completion {completion}")
    log.warning("bad_reward", function=name, what=what, prompt=prompt, completion=completion)
    if (log_metric := told.get("log_metric")) is not None:
        log_metric(f"reward_failures/{name.rpartition('.')[2]}", 1.0)


def said(error: BaseException) -> str:
    if isinstance(error, TooLong | TimeoutError):
        return "took too long"
    return f"raised {type(error).__name__}: {' '.join(str(error).split())}"


@contextlib.contextmanager
def interrupted(timeout_s: float, name: str) -> Iterator[None]:
    """Raise TooLong in what runs within, in the main thread, after so many seconds.

    A function that does not notice within GRACE_S more ends the process with exit code 1, after where it stands:
    code that holds the interpreter's lock lets no other thread of Python's run, and faulthandler's needs no lock.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ended, telling = threading.Event(), threading.Lock()

    def interrupt(*_: Any) -> None:
        if not ended.is_set():
            raise TooLong

    def watch() -> None:
        if ended.wait(timeout_s):
            return
        with telling:
            if not ended.is_set():
                log.warning("reward_hangs", function=name, timeout_s=timeout_s)
                signal.pthread_kill(_ident(threading.main_thread()), signal.SIGUSR2)

    faulthandler.dump_traceback_later(timeout_s + GRACE_S, exit=True, file=2)
    before = signal.signal(signal.SIGUSR2, interrupt)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        faulthandler.cancel_dump_traceback_later()
        with telling:  # no signal comes from now on
            signal.signal(signal.SIGUSR2, before)


def _ident(thread: threading.Thread) -> int:
    assert thread.ident is not None
    return thread.ident


# What is done about tools and environments that raise, hang, or score by what is no number.
#
# What a tool raises is told to the model, by TRL. A tool that hangs is interrupted as a reward function is; so
# are an environment's own methods, whose errors nobody but the user can answer.

RESET, REWARD = "reset", "get_reward"


class ToolFailed(BaseException):
    """A tool hangs, and the rule is `fail`. No Exception: TRL tells those to the model."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What is done about a fault, how long one call may take, and whether an error is not the user's code's."""

    on_bad_reward: OnBadReward
    timeout_s: float
    passes: Callable[[BaseException], bool]


def guarded_tool(tool: Callable[..., Any], name: str, rule: Rule, where: Callable[[], str] = str) -> Any:
    """Return the tool, interrupted where it hangs: a TimeoutError for the model, or by the rule `fail` ToolFailed.

    What is awaited is left as it is: TRL runs it in a thread, where nothing can interrupt it.
    """
    if inspect.iscoroutinefunction(tool):
        return tool

    @functools.wraps(tool)
    def within(*args: Any, **kwargs: Any) -> Any:
        try:
            with interrupted(rule.timeout_s, name):
                return tool(*args, **kwargs)
        except TooLong:
            told = f"{name} took too long{where()}"
        except SystemExit as error:
            told = f"{name} {said(error)}{where()}"
        if rule.on_bad_reward == "fail":
            raise ToolFailed(told)
        log.warning("bad_tool", tool=name, what=told)
        raise TimeoutError(told)

    return within


def guarded_factory(factory: Callable[[], Any], name: str, rule: Rule) -> Callable[[], Any]:
    """Return what makes environments whose methods are looked at.

    Args:
        name: its import path.
    """

    @functools.wraps(factory, updated=())
    def make() -> Any:
        made = factory()
        with contextlib.suppress(AttributeError):  # one with slots stays as it is
            _guard_environment(made, name, rule)
        return made

    return make


def _guard_environment(made: Any, name: str, rule: Rule) -> None:
    row = {"prompt": "nothing yet"}

    def where() -> str:
        return f", for the prompt {shown(text_of(row['prompt']))}"

    def called(method: Callable[..., Any], told: dict[str, Any]) -> Any:
        try:
            with interrupted(rule.timeout_s, name):
                return method(**told)
        except (TooLong, *FAULTS) as error:
            if rule.passes(error):
                raise
            raise BadReward(f"{name}.{method.__name__} {said(error)}{where()}") from error

    reset, reward = made.reset, getattr(made, REWARD, None)

    def begin(**told: Any) -> Any:
        row["prompt"] = told.get("prompt", "")
        return called(reset, told)

    def score() -> Any:
        assert reward is not None
        try:
            value = called(reward, {})
            if value is None or math.isfinite(float(value)):
                return value
            raise BadReward(f"{name}.{REWARD} returned {value}{where()}")
        except (BadReward, TypeError, ValueError) as error:
            bad = error if isinstance(error, BadReward) else BadReward(f"{name}.{REWARD} {said(error)}{where()}")
            if rule.on_bad_reward == "fail":
                raise bad from error
            log.warning("bad_reward", function=f"{name}.{REWARD}", what=str(bad))
            return None

    made.reset = begin
    if reward is not None and not inspect.iscoroutinefunction(reward):
        made.get_reward = score
    for tool, _ in inspect.getmembers(type(made), predicate=inspect.isfunction):
        if not tool.startswith("_") and tool not in (RESET, REWARD):
            setattr(made, tool, guarded_tool(getattr(made, tool), f"{name}.{tool}", rule, where))
