"""Agents for the trainer's tests."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

FAULTS = "RIG_AGENT_FAULTS"  # a folder: the first agent that removes a file from it does what its name says


def ask(base_url: str, api_key: str, messages: list[dict[str, str]]) -> str:
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return str(json.loads(answer.read())["choices"][0]["message"]["content"])


def lower_share(text: str) -> float:
    return sum(map(str.islower, text)) / max(1, len(text))


async def solve(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """Three turns; the reward is the share of lower-case letters in all of them."""
    messages = [{"role": "user", "content": str(row["prompt"])}]
    said = ""
    for turn in range(3):
        text = await asyncio.to_thread(ask, base_url, api_key, messages)
        said += text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f" {turn}? "}]
    return lower_share(said)


def command() -> float:
    """The same, as a program."""
    row = json.loads(os.environ["GRPO_ORCH_ROW"])
    row["prompt"] = row["prompt"][0]["content"]
    return asyncio.run(solve(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], row))


def unsure(base_url: str, api_key: str, _: dict[str, Any]) -> None:
    ask(base_url, api_key, [{"role": "user", "content": "?"}])


def fails(base_url: str, api_key: str, _: dict[str, Any]) -> float:
    ask(base_url, api_key, [{"role": "user", "content": "?"}])
    raise ValueError("as always")


async def faulty(base_url: str, api_key: str, row: dict[str, Any]) -> float | None:
    """The same, but for the faults that the test has laid out, each once."""
    for fault in sorted(Path(os.environ[FAULTS]).iterdir()):
        try:
            fault.unlink()
        except FileNotFoundError:  # another agent was quicker
            continue
        match fault.name:
            case "silent":
                return 1.0
            case "crash":
                ask(base_url, api_key, [{"role": "user", "content": "1"}])
                os._exit(1)
            case "rewrite":  # its history after the second turn
                await solve(base_url, api_key, row)
                ask(base_url, api_key, [{"role": "user", "content": "in short?"}])
                return 0.5
            case "hang":
                ask(base_url, api_key, [{"role": "user", "content": "2"}])
                await asyncio.sleep(600)
    return await solve(base_url, api_key, row)


async def branches(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """Three turns, and two in a conversation of its own."""
    reward = await solve(base_url, api_key, row)
    messages = [{"role": "user", "content": "in short, please?"}]
    for text in ("shorter!", ""):
        said = await asyncio.to_thread(ask, base_url, api_key, messages)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": text}]
    return reward


def share_of_messages(
    messages: list[list[dict[str, Any]]], agent_reward: list[float | None], **_: Any
) -> list[float]:
    """A reward function beside the agent's own."""
    assert len(messages) == len(agent_reward)
    return [lower_share("".join(str(one["content"]) for one in conversation)) for conversation in messages]
