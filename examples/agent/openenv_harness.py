"""The doors of agent.py under a harness of OpenEnv.

OpenEnv does not install next to vLLM, so it gets an environment of its own:

    python3.11 -m venv build/openenv
    build/openenv/bin/pip install 'openenv==0.10.*' msgspec psutil

In run.yaml:

    agent:
      run: openenv_harness.solve
      python: build/openenv/bin/python
"""

from __future__ import annotations

from typing import Any

from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness.collect import build_model_step
from openenv.core.harness.rollout import (
    HarnessRunLimits,
    MCPHarnessAdapter,
    ResourceSession,
    ToolResult,
    VerifyResult,
)
from openenv.core.llm_client import OpenAIClient

TURNS, TOKENS = 4, 1  # a tool call is one token of this model
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
DOOR = {
    "type": "object",
    "properties": {"door": {"type": "string", "enum": ["left", "right"]}},
    "required": ["door"],
}


class Doors(ResourceSession):
    """One session's doors."""

    def __init__(self, row: dict[str, Any]) -> None:
        self._row = row
        self._has_looked, self._opened = False, ""

    def initial_messages(self) -> list[dict[str, Any]]:
        return list(self._row["prompt"])

    def list_tools(self) -> list[Tool]:
        return [
            Tool(name="look", description="Tells the door.", input_schema=NOTHING),
            Tool(name="open", description="Opens a door.", input_schema=DOOR),
        ]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        if name == "look":
            self._has_looked = True
            return ToolResult(data=self._row["door"])
        self._opened = str(arguments["door"])
        return ToolResult(data="won" if self._opened == self._row["door"] else "lost", done=True)

    def verify(self, _transcript: list[Any], _final_state: Any | None = None) -> VerifyResult:
        return VerifyResult(env_reward=0.3 * self._has_looked + 0.7 * (self._opened == self._row["door"]))

    def close(self) -> None:
        pass


def solve(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """Play once and return the reward."""
    doors = Doors(row)
    client = OpenAIClient(base_url, None, "policy", api_key=api_key, max_tokens=TOKENS)
    limits = HarnessRunLimits(max_turns=TURNS)
    MCPHarnessAdapter().run_white_box(build_model_step(client), doors, limits)
    return doors.verify([]).env_reward or 0.0
