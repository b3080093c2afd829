"""Environments of TRL's around clients with `reset` and `step`, as OpenEnv's are. None is imported here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

from tasks.rewards.guarded_turns import ToolFailed


class SteppedEnvironment:
    """What a user's class inherits from: it says how to connect, and its public methods, the model's tools, take
    steps.

    The reward is the sum of the steps'. Each episode has a connection of its own, opened by `reset` and closed
    once the reward is known. A server that is away ends the trainer, which is started again.
    """

    _columns: ClassVar[tuple[str, ...]] = ()  # of a row, that the client's `reset` gets where they are there

    def __init__(self) -> None:
        self._client: Any = None
        self._reward = 0.0
        self._done = False

    def _connect(self) -> Any:
        """A new client, with `reset`, `step` and `close`."""
        raise NotImplementedError

    def _shown(self, observation: Any) -> str:
        """What the model is told of an observation."""
        return str(observation)

    def reset(self, **columns: Any) -> str:
        self._close()
        self._reward, self._done = 0.0, False
        told = {name: columns[name] for name in self._columns if columns.get(name) is not None}
        try:
            self._client = self._connect()
            return self._taken(lambda: self._client.reset(**told))
        except ToolFailed as error:
            raise ConnectionError(str(error)) from error

    def get_reward(self) -> float:
        self._close()
        return self._reward

    def _step(self, action: Any) -> str:
        """Take a step. Raises ValueError, for the model, after the last one."""
        if self._done:
            raise ValueError("it is over")
        return self._taken(lambda: self._client.step(action))

    def _taken(self, call: Callable[[], Any]) -> str:
        try:
            result = call()
        except RuntimeError:  # what OpenEnv's client makes of an error that the server tells of
            raise
        except Exception as error:  # the connection's, which TRL would tell the model, and train on
            raise ToolFailed(f"{type(self).__name__} lost its server: {type(error).__name__}: {error}") from error
        self._reward += float(result.reward or 0.0)
        self._done = bool(result.done)
        return self._shown(result.observation)

    def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):  # it may be gone, and nothing is asked of it any more
                client.close()

    def __del__(self) -> None:
        self._close()
