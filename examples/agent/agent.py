"""An agent of two tools, written against the `openai` package and nothing of grpo-orch.

Something lies behind one of two doors. The agent may look, which tells it the door, and must open one. It earns
0.3 for looking, and 0.7 for the right door.
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
        self.has_looked, self.opened = False, ""

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        if name == "look":
            self.has_looked = True
            return self.door
        self.opened = str(arguments["door"])
        return "won" if self.opened == self.door else "lost"

    @property
    def reward(self) -> float:
        return 0.3 * self.has_looked + 0.7 * (self.opened == self.door)


async def solve(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """Play once and return the reward."""
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
            answered = doors.call(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answered})
        if doors.opened:
            break
    return doors.reward
