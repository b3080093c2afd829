"""What the steps since the last log cost and earned, gathered where it happens, read where it is logged."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from checkpoint.records import metrics
from checkpoint.records.rollouts import Rollout


@dataclass(slots=True)
class StepCosts:
    """Sums since they were last taken. Evaluation adds what it lost and waited, not the tokens trained on."""

    tokens: int = 0
    discarded: int = 0
    wait_s: float = 0.0
    generate_s: float = 0.0  # seconds in which completions to train on were made
    generate_node_s: float = 0.0  # the same, times the machines that made them
    ahead_s: float = 0.0  # of these and of `wait_s`, in which the trainer was at work on earlier steps
    unserved_s: float = 0.0  # seconds in which training requests were open and no node could serve them
    staleness: int | None = None  # steps between sampling and training, the most of any window; None: no window
    own_generate_s: float = 0.0  # of these, in which the trainer made them in place of nodes that were not there
    rewards_s: float = 0.0  # seconds in which completions to train on were scored
    store_s: float = 0.0  # seconds in which the trainer stood still for a checkpoint
    replayed: list[bool] = field(default_factory=list)  # of each training call
    generated_s: float = 0.0  # what generating has taken so far; never begun anew
    rewards: list[float] = field(default_factory=list)  # of each completion trained on
    published: dict[str, float] = field(default_factory=dict)  # policies: seconds, bytes
    refused: dict[str, float] = field(default_factory=dict)  # how many prompts, and the numbers of the last one

    def add(self, rollout: Rollout, wait_s: float, *, training: bool, replayed: bool) -> None:
        """A call's completions; for `wait_s` the trainer waited for them and no node could serve."""
        self.discarded += rollout.discarded
        self.wait_s += wait_s
        if training:
            self.tokens += rollout.tokens
            self.replayed.append(replayed)
            self.staleness = max(self.staleness or 0, rollout.staleness)

    def generated(self, seconds: float, machines: int, ahead_s: float = 0.0, unserved_s: float = 0.0) -> None:
        """So many machines made completions to train on for so many seconds; for `ahead_s` of these, and of those
        in which no node served, the trainer was at work on earlier steps. For `unserved_s` no node could serve."""
        self.ahead_s += ahead_s
        self.unserved_s += unserved_s
        self.generate_s += seconds
        self.generate_node_s += seconds * machines

    def made_itself(self, seconds: float, *, training: bool) -> None:
        """The trainer has made completions for so many seconds, in place of rollout nodes."""
        self.generated_s += seconds
        if training:
            self.generate_s += seconds
            self.own_generate_s += seconds

    def refuse(self, prompts: int, row: int | None, tokens: int, limit_tokens: int | None) -> None:
        """So many prompts were left out; the numbers are the last one's, where they are known."""
        before = self.refused.get(metrics.PROMPTS_REFUSED, 0.0)
        numbers = {metrics.REFUSED_ROW: row, metrics.REFUSED_TOKENS: tokens, metrics.REFUSED_LIMIT: limit_tokens}
        known = {name: float(number) for name, number in numbers.items() if number is not None}
        self.refused = {metrics.PROMPTS_REFUSED: before + prompts, **known}

    def publish(self, took_s: float, sent_bytes: int, weights_bytes: int, encode_s: float = 0.0) -> None:
        """A policy was published; after `encode_s` of this all was encoded, and some of it sent."""
        numbers = {
            metrics.PUBLISHED: 1.0,
            metrics.ENCODE_S: encode_s,
            metrics.PUBLISH_S: took_s,
            metrics.PUBLISHED_BYTES: sent_bytes,
            metrics.WEIGHTS_BYTES: weights_bytes,
        }
        self.published = {name: self.published.get(name, 0.0) + number for name, number in numbers.items()}

    def take(self) -> dict[str, float]:
        """Return the sums under their names in `checkpoint.records.metrics` and begin anew."""
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
        if self.own_generate_s:
            values[metrics.OWN_GENERATE_S] = round(self.own_generate_s, 3)
        if self.ahead_s:
            values[metrics.AHEAD_S] = round(self.ahead_s, 3)
        if self.staleness is not None:
            values[metrics.STALENESS] = float(self.staleness)
        values |= self.refused | self.published
        self.tokens, self.discarded, self.wait_s, self.refused, self.published = 0, 0, 0.0, {}, {}
        self.generate_s = self.generate_node_s = self.ahead_s = self.own_generate_s = 0.0
        self.unserved_s = self.rewards_s = self.store_s = 0.0
        self.staleness = None
        self.replayed.clear()
        self.rewards.clear()
        return values
