"""The same as JSON's own types, for programs and templates. Texts are whole, as they were stored."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from checkpoint.records.samples import Message
from orchestrator.samples.choose import Found, Summary
from orchestrator.samples.steps import Step, policy_of


def completion(one: Found) -> dict[str, Any]:
    """One completion, without its prompt."""
    sample = one.sample
    places = [*sample.handed_over_chars, *[None] * len(sample.handed_over)]
    return {
        "link": str(one.link),
        "group": one.link.group,
        "index": one.link.index,
        "reward": sample.reward,
        "rewards": [
            {"function": name, "weight": weight, "reward": reward}
            for name, weight, reward in zip(one.head.functions, one.head.weights, sample.rewards, strict=False)
        ],
        "advantage": sample.advantage,
        "tokens": sample.tokens,
        "cut": sample.cut,
        "node": sample.node,
        "policy": sample.policy,
        "handed_over": [
            {"node": part.node, "tokens": part.tokens, "char": char}
            for part, char in zip(sample.handed_over, places, strict=False)
        ],
        "mismatch_mean": sample.mismatch_mean,
        "mismatch_max": sample.mismatch_max,
        "refused": sample.refused,
        "completion": messages(sample.completion),
    }


def messages(told: list[Message]) -> list[dict[str, Any]]:
    """A prompt or a completion; `left_out` characters are missing before the last `after` of a text."""
    return [asdict(one) for one in told]


def summary(step: Step, told: Summary) -> dict[str, Any]:
    """A step and what its completions have in common."""
    return {"step": str(step), "policy": str(policy_of(step)), **asdict(told)}
