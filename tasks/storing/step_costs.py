"""Collect times, tokens and rewards of the steps since the last logged row."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from grpo_orch.checkpoint.records import metrics
from grpo_orch.checkpoint.records.rollouts import Rollout


@dataclass(slots=True)
class StepCosts:
    """Sums since the last `take`. Evaluation adds discarded tokens and waiting times, but no training tokens."""

    tokens: int = 0
    discarded: int = 0
    wait_s: float = 0.0
    generate_s: float = 0.0  # generating completions to train on
    generate_node_s: float = 0.0  # the same, multiplied by the number of machines
    ahead_s: float = 0.0  # part of generate_s and wait_s in which the trainer worked on earlier steps
    unserved_s: float = 0.0  # training requests were open while no node could serve them
    staleness: int | None = None  # steps between sampling and training, maximum of all windows; None: no window
    rewards_s: float = 0.0  # scoring completions to train on
    store_s: float = 0.0  # the trainer waited for a checkpoint
    replayed: list[bool] = field(default_factory=list)  # of each training call
    generated_s: float = 0.0  # all generation so far; never reset
    rewards: list[float] = field(default_factory=list)  # of each completion trained on
    published: dict[str, float] = field(default_factory=dict)  # seconds and bytes of publications
    refused: dict[str, float] = field(default_factory=dict)  # number of prompts, and details of the last one

    def add(self, rollout: Rollout, wait_s: float, *, training: bool, replayed: bool) -> None:
        """Add a call's completions, for which the trainer waited `wait_s` while no node could serve."""
        self.discarded += rollout.discarded
        self.wait_s += wait_s
        if training:
            self.tokens += rollout.tokens
            self.replayed.append(replayed)
            self.staleness = max(self.staleness or 0, rollout.staleness)

    def add_generation(self, seconds: float, machines: int, ahead_s: float = 0.0, unserved_s: float = 0.0) -> None:
        """Add time in which `machines` generated completions to train on.

        Args:
            ahead_s: part of it, and of the time without a serving node, in which the trainer worked on earlier
                steps.
            unserved_s: time in which no node could serve.
        """
        self.ahead_s += ahead_s
        self.unserved_s += unserved_s
        self.generate_s += seconds
        self.generate_node_s += seconds * machines

    def refuse(self, prompts: int, row: int | None, tokens: int, limit_tokens: int | None) -> None:
        """Count prompts that were left out. `row`, `tokens` and `limit_tokens` describe the last one."""
        before = self.refused.get(metrics.PROMPTS_REFUSED, 0.0)
        details = {metrics.REFUSED_ROW: row, metrics.REFUSED_TOKENS: tokens, metrics.REFUSED_LIMIT: limit_tokens}
        known = {name: float(number) for name, number in details.items() if number is not None}
        self.refused = {metrics.PROMPTS_REFUSED: before + prompts, **known}

    def publish(self, took_s: float, sent_bytes: int, weights_bytes: int, encode_s: float = 0.0) -> None:
        """Add a published policy. Encoding took the first `encode_s`, and sending overlapped with it."""
        numbers = {
            metrics.PUBLISHED: 1.0,
            metrics.ENCODE_S: encode_s,
            metrics.PUBLISH_S: took_s,
            metrics.PUBLISHED_BYTES: sent_bytes,
            metrics.WEIGHTS_BYTES: weights_bytes,
        }
        self.published = {name: self.published.get(name, 0.0) + number for name, number in numbers.items()}

    def take(self) -> dict[str, float]:
        """Return the sums by their names in `checkpoint.records.metrics`, and reset them."""
        values: dict[str, float] = {
            metrics.TOKENS: self.tokens,
            metrics.TOKENS_DISCARDED: self.discarded,
            metrics.WAIT_S: round(self.wait_s, 3),
            metrics.GENERATE_S: round(self.generate_s, 3),
            metrics.GENERATE_NODE_S: round(self.generate_node_s, 3),
            metrics.UNSERVED_S: round(self.unserved_s, 3),
            metrics.REWARDS_S: round(self.rewards_s, 6),  # a small function takes microseconds
            metrics.STORE_S: round(self.store_s, 3),
        }
        if self.replayed:
            values[metrics.REPLAYED] = float(all(self.replayed))
        if finite := [reward for reward in self.rewards if math.isfinite(reward)]:
            values[metrics.REWARD_MIN], values[metrics.REWARD_MAX] = min(finite), max(finite)
        if self.ahead_s:
            values[metrics.AHEAD_S] = round(self.ahead_s, 3)
        if self.staleness is not None:
            values[metrics.STALENESS] = float(self.staleness)
        values |= self.refused | self.published
        self.tokens, self.discarded, self.wait_s, self.refused, self.published = 0, 0, 0.0, {}, {}
        self.generate_s = self.generate_node_s = self.ahead_s = 0.0
        self.unserved_s = self.rewards_s = self.store_s = 0.0
        self.staleness = None
        self.replayed.clear()
        self.rewards.clear()
        return values
