"""Tools and environments that raise, hang, or score by what is no number."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from grpo_orch.policies.model.spec import OnBadReward
from grpo_orch.tasks.rewards.user_calls import BadReward, Rule, ToolFailed, guarded_factory, guarded_tool
from tests.budget import HANG_S

SHORT_S = 0.05


def rule(on_bad_reward: OnBadReward = "fail", timeout_s: float = HANG_S) -> Rule:
    return Rule(on_bad_reward, timeout_s, lambda error: isinstance(error, ConnectionError))


def hangs() -> None:
    while True:
        try:
            time.sleep(0.001)
        except Exception:  # noqa: BLE001  # as users write it
            continue


class Room:
    """An environment that does what its row says."""

    def reset(self, does: str, **_: Any) -> str:
        self.does = does
        if does == "reset raises":
            raise KeyError("door")
        if does == "reset hangs":
            hangs()
        if does == "the network is away":
            raise ConnectionResetError
        return "in"

    def step(self, way: str) -> str:
        """Go.

        Args:
            way: Where.
        """
        if self.does == "step raises":
            raise ValueError("a wall")
        if self.does == "step hangs":
            hangs()
        return way

    def get_reward(self) -> Any:
        return {"nan": float("nan"), "text": "much", "none": None}.get(self.does, 1.0)


def room(does: str, on: Rule | None = None) -> Any:
    made = guarded_factory(Room, "envs.Room", on or rule())()
    made.reset(does=does, prompt=[{"role": "user", "content": "Go on."}], answer=1)
    return made


def hanging_room(on_bad_reward: OnBadReward) -> Any:
    """One whose steps alone have little time: on a busy machine a beginning may take longer."""
    on: Any = SimpleNamespace(on_bad_reward=on_bad_reward, timeout_s=HANG_S, passes=lambda _: False)
    made = room("step hangs", on)
    on.timeout_s = SHORT_S
    return made


def test_working_tool_is_unchanged() -> None:
    made = room("nothing")
    assert (made.step(way="left"), made.get_reward(), type(made)) == ("left", 1.0, Room)
    assert (made.step.__name__, made.step.__doc__) == ("step", Room.step.__doc__)
    assert room("none").get_reward() is None

    async def waits() -> None:
        await asyncio.sleep(0)

    assert guarded_tool(waits, "tools.waits", rule()) is waits


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("reset raises", "reset raised KeyError: 'door'"),
        ("reset hangs", "reset timed out"),
    ],
)
def test_environment_that_does_not_start_is_named_with_prompt(does: str, says: str) -> None:
    with pytest.raises(BadReward) as caught:
        room(does, rule("none", SHORT_S if "hangs" in does else HANG_S))
    assert str(caught.value) == f"envs.Room.{says}, for the prompt 'Go on.'"


def test_foreign_fault_is_passed_on() -> None:
    with pytest.raises(ConnectionResetError):
        room("the network is away")


def test_tools_error_is_shown_to_the_model() -> None:
    with pytest.raises(ValueError, match=r"^a wall$"):
        room("step raises").step(way="left")


def test_hanging_tool_is_reported_to_model_or_ends_the_run() -> None:
    says = r"^envs.Room.step timed out, for the prompt 'Go on.'$"
    with pytest.raises(TimeoutError, match=says):
        hanging_room("none").step(way="left")
    with pytest.raises(ToolFailed, match=says):
        hanging_room("fail").step(way="left")


@pytest.mark.parametrize(
    ("does", "says"), [("nan", "returned nan"), ("text", "raised ValueError: could not convert string to float")]
)
def test_environments_reward_of_none_follows_the_rule(does: str, says: str) -> None:
    with pytest.raises(BadReward, match=f"envs.Room.get_reward {says}"):
        room(does).get_reward()
    with capture_logs() as logs:
        assert room(does, rule("none")).get_reward() is None
    assert says in logs[0]["problem"]
