"""Tools and environments for runs of several turns, and the tiny model with a chat template that calls them.

A random model calls a tool as soon as it says a digit: what stands behind that digit is the call's argument. It
ends its turn with a capital letter of the first half of the alphabet: so half of its turns call a tool.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

CHAT = (
    "{%- if asked -%}!{%- endif -%}"
    "{%- for one in messages -%}"
    "{%- if one.role == 'assistant' -%}<bos>{{ one.content }}"
    "{%- for call in one.tool_calls or [] -%}{{ call.function.name }}"
    "{%- for name, value in call.function.arguments.items() -%}{{ name }}{{ value }}{%- endfor -%}"
    "{%- endfor -%}<eos>"
    "{%- elif one.role == 'tool' -%}({{ one.content }})"
    "{%- else -%}{{ one.content }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<bos>{%- endif -%}"
)
RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<bos>",
    "fields": {
        "tool_calls": {
            "open_pattern": "[0-9]",
            "close_pattern": "$",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "climb", "arguments": {"steps": "{content}"}}},
        },
        "content": {"close": "<eos>", "content": "text"},
    },
}

_said = itertools.count()


def make_chatty(tiny: Path) -> None:
    """Give the tiny model what tools need, and write `chats.jsonl`: its prompts as messages."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    tokenizer.chat_template, tokenizer.response_template = CHAT, RESPONSES
    tokenizer.save_pretrained(tiny / "model")
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list("ABCDEFGHIJKLM"))]
    for name in ("config.json", "generation_config.json"):
        said = json.loads((tiny / "model" / name).read_text())
        (tiny / "model" / name).write_text(json.dumps({**said, "eos_token_id": ends}))
    prompts = [json.loads(line)["prompt"] for line in (tiny / "few.jsonl").read_text().splitlines()]
    chats = [{"prompt": [{"role": "user", "content": text}], "height": n} for n, text in enumerate(prompts)]
    (tiny / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))


class Ladder:
    """How high a completion has climbed, from the height that its row says."""

    def reset(self, height: int, **_: Any) -> str:
        self.height = height
        return f" at {height}"

    def climb(self, steps: str) -> str:
        """Climb some steps.

        Args:
            steps: As many as there are letters.
        """
        self.height += 1 + len(steps)
        return str(self.height)

    def get_reward(self) -> float:
        return self.height / 10


class Slippery(Ladder):
    """One that says something else each time."""

    def climb(self, steps: str) -> str:
        """Climb some steps.

        Args:
            steps: As many as there are letters.
        """
        return f"{super().climb(steps)}-{next(_said)}"


def climb(steps: str) -> str:
    """Climb some steps.

    Args:
        steps: As many as there are letters.
    """
    return str(len(steps))


def undescribed(steps) -> str:  # type: ignore[no-untyped-def]  # which is what is wrong with it
    return str(steps)


def share_of_calls(completions: list[list[dict[str, Any]]], **_: Any) -> list[float]:
    """The share of a completion's messages that tools said."""
    return [sum(one["role"] == "tool" for one in messages) / len(messages) for messages in completions]


def two_halves(prompts: list[list[dict[str, str]]], trainer: Any) -> dict[str, Any]:
    """Completions of two generate calls, the second behind what the first has made."""
    read = trainer.processing_class.apply_chat_template
    prompt_ids = [read(one, add_generation_prompt=True, return_dict=False) for one in prompts]
    completion_ids: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float | None]] = [[] for _ in prompts]
    for _ in range(2):
        so_far = [ids + made for ids, made in zip(prompt_ids, completion_ids, strict=True)]
        _, made, of_tokens, _ = trainer.vllm_generation.generate(so_far, images=None, num_generations=1)
        completion_ids = [ids + more for ids, more in zip(completion_ids, made, strict=True)]
        more_logprobs = [[one[0] for one in of_one] for of_one in of_tokens]
        logprobs = [ids + more for ids, more in zip(logprobs, more_logprobs, strict=True)]
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}
