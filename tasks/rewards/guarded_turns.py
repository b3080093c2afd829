"""What is done about tools and environments that raise, hang, or score by what is no number.

What a tool raises is told to the model, by TRL. A tool that hangs is interrupted as a reward function is; so
are an environment's own methods, whose errors nobody but the user can answer.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from policies.model.spec import OnBadReward
from tasks.rewards.guard import FAULTS, BadReward, TooLong, interrupted, said
from tasks.rewards.texts import shown, text_of

log = structlog.get_logger()

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
            _guard(made, name, rule)
        return made

    return make


def _guard(made: Any, name: str, rule: Rule) -> None:
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
