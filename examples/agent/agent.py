"""An agent of two tools, written against the `openai` package and nothing of grpo-orch.

Something lies behind one of two doors. The agent may look, which tells behind which, and must open one.
"""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

TURNS = 4
TOKENS = 1  # of an answer: a tool call is one token of this model
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
DOOR = {
    "type": "object",
    "properties": {"door": {"type": "string", "enum": ["left", "right"]}},
    "required": ["door"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "description": "Tells the door.", "parameters": NOTHING}},
    {"type": "function", "function": {"name": "open", "description": "Opens a door.", "parameters": DOOR}},
]


class Doors:
    """What the tools act on."""

    def __init__(self, door: str) -> None:
        self.door = door
        self.reward: float | None = None

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        if name == "look":
            return self.door
        self.reward = float(arguments.get("door") == self.door)
        return "won" if self.reward else "lost"


async def solve(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """Return 1 for the right door, and 0 for the wrong one or none."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    doors, messages = Doors(row["door"]), list(row["prompt"])
    for _ in range(TURNS):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, max_tokens=TOKENS
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            told = doors.call(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
        if doors.reward is not None:
            break
    return doors.reward or 0.0
