"""A client with `reset` and `step` as an environment of TRL's. The client is a stand-in of OpenEnv's interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from tasks.rewards.guard import BadReward
from tasks.rewards.guarded_turns import Rule, ToolFailed, guarded_factory
from tasks.rewards.stepped import SteppedEnvironment
from tests.budget import HANG_S


@dataclass
class Result:
    """As `openenv.core.client_types.StepResult`."""

    observation: Any
    reward: float | None = None
    done: bool = False


@dataclass
class Stairs:
    """A client whose episode ends at the top; each step is worth half a point."""

    height: int = 0
    is_open: bool = True

    def reset(self, top: int = 2, **others: Any) -> Result:
        assert not others
        if top == 8:
            raise TimeoutError("timed out while waiting for a message")
        self.top = top
        return Result(f"{top} to go")

    def step(self, action: int) -> Result:
        if action == 7:
            raise RuntimeError("Server error: no such stair (code: BAD)")
        if action == 8:
            raise TimeoutError("timed out while waiting for a message")
        self.height += action
        return Result(f"{self.top - self.height} to go", 0.5, self.height >= self.top)

    def close(self) -> None:
        self.is_open = False


class Climb(SteppedEnvironment):
    _columns = ("top",)
    opened: ClassVar[list[Stairs]] = []

    def _connect(self) -> Stairs:
        self.opened.append(Stairs())
        return self.opened[-1]

    def climb(self, steps: int) -> str:
        """Climb.

        Args:
            steps: How many.
        """
        return self._step(steps)


def begun(**row: Any) -> Any:
    Climb.opened = []
    made = guarded_factory(Climb, "games.Climb", Rule("none", HANG_S, lambda _: False))()
    assert made.reset(prompt="p", completion="c", **row) == f"{row.get('top') or 2} to go"
    return made


def test_an_episode_and_the_next_one() -> None:
    made = begun(top=3)
    assert made.climb(1) == "2 to go"
    assert made.climb(steps=2) == "0 to go"
    with pytest.raises(ValueError, match="it is over"):
        made.climb(1)
    assert made.get_reward() == 1.0
    assert [one.is_open for one in Climb.opened] == [False]
    assert made.reset(top=None) == "2 to go"  # a row without the column
    assert made.get_reward() == 0.0
    assert [one.is_open for one in Climb.opened] == [False, False]


def test_the_model_is_told_what_the_server_says_and_never_that_it_is_away() -> None:
    made = begun()
    with pytest.raises(RuntimeError, match="no such stair"):
        made.climb(7)
    with pytest.raises(ToolFailed, match="Climb lost its server: TimeoutError: timed out"):
        made.climb(8)
    with pytest.raises(BadReward, match=r"games\.Climb\.reset raised ConnectionError: Climb lost its server"):
        made.reset(prompt="p", top=8)
    assert not issubclass(ToolFailed, Exception), "TRL tells the model of those"
    assert made.get_reward() == 0.0


def test_an_episode_that_was_left_is_closed_before_the_next() -> None:
    made = begun()
    made.reset()
    assert [one.is_open for one in Climb.opened] == [False, True]
    made._close()
    made._close()
    assert [one.is_open for one in Climb.opened] == [False, False]
