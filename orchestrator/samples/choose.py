"""Which completions of a step somebody wants to read: by words, reward, node, version; the worst, the best."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from checkpoint.records.samples import Group, Head, Sample
from orchestrator.samples.steps import Link, Step


class Order(StrEnum):
    """What comes first. A completion without a reward is neither bad nor good, and comes last."""

    STORED = "stored"
    WORST = "worst"
    BEST = "best"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a completion must be; what is empty or None is not asked for.

    `search` is found in its text or its prompt, whatever the case.
    """

    search: str = ""
    reward_min: float | None = None
    reward_max: float | None = None
    node: str = ""
    policy: str = ""
    cut: bool | None = None
    handed_over: bool | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """One completion with where it stands."""

    link: Link
    head: Head
    group: Group
    sample: Sample


@dataclass(frozen=True, slots=True)
class Summary:
    """What a step's completions have in common, whether or not one wants them."""

    prompts: int
    completions: int
    matching: int
    cut: int
    handed_over: int
    reward_min: float | None
    reward_mean: float | None
    reward_max: float | None
    nodes: tuple[str, ...]
    policies: tuple[str, ...]


def choose(
    step: Step,
    groups: Iterable[tuple[int, Head, Group]],
    wanted: Wanted,
    order: Order,
    count: int,
    first: int = 0,
) -> tuple[list[Found], Summary]:
    """`count` of the wanted completions from the `first` on, in their order; and what all have in common.

    The groups are gone through once, and no more is kept of them than is returned and what comes before it.
    Raises what reading them raises.
    """
    tally = _Tally()
    found = (one for one in _all(step, groups) if tally.counts(one, matches(one, wanted)))
    match order:
        case Order.STORED:
            chosen = [one for place, one in enumerate(found) if first <= place < first + count]
        case Order.WORST | Order.BEST:
            sign = 1 if order is Order.WORST else -1
            chosen = heapq.nsmallest(first + count, found, key=lambda one: _rank(one, sign))[first:]
    return chosen, tally.summary()


def matches(one: Found, wanted: Wanted) -> bool:
    """Whether a completion is what is wanted."""
    sample = one.sample
    if wanted.reward_min is not None and (sample.reward is None or sample.reward < wanted.reward_min):
        return False
    if wanted.reward_max is not None and (sample.reward is None or sample.reward > wanted.reward_max):
        return False
    asked = (
        (wanted.node, {sample.node, *(part.node for part in sample.handed_over)}),
        (wanted.policy, {sample.policy, _version(sample)}),
    )
    if any(want and want not in has for want, has in asked):
        return False
    if wanted.cut is not None and sample.cut is not wanted.cut:
        return False
    if wanted.handed_over is not None and bool(sample.handed_over) is not wanted.handed_over:
        return False
    word = wanted.search.casefold()
    return not word or any(word in text.text.casefold() for text in (*sample.completion, *one.group.prompt))


def _version(sample: Sample) -> str:
    return sample.policy.partition("@")[0]  # its label names the artifact too


def _rank(one: Found, sign: int) -> tuple[bool, float]:
    reward = one.sample.reward
    return reward is None, 0.0 if reward is None else sign * reward


def _all(step: Step, groups: Iterable[tuple[int, Head, Group]]) -> Iterator[Found]:
    for number, head, group in groups:
        for index, sample in enumerate(group.samples):
            yield Found(Link(str(step), number, index), head, group, sample)


class _Tally:
    """Counts what goes by."""

    def __init__(self) -> None:
        self._groups, self._nodes, self._policies = set[int](), set[str](), set[str]()
        self._completions = self._matching = self._cut = self._handed_over = 0
        self._rewards = list[float]()

    def counts(self, one: Found, matching: bool) -> bool:
        sample = one.sample
        self._groups.add(one.link.group)
        self._nodes |= {sample.node} - {""}
        self._policies |= {_version(sample)} - {""}
        self._completions += 1
        self._matching += matching
        self._cut += sample.cut is True
        self._handed_over += bool(sample.handed_over)
        if sample.reward is not None:
            self._rewards.append(sample.reward)
        return matching

    def summary(self) -> Summary:
        rewards = self._rewards
        return Summary(
            prompts=len(self._groups),
            completions=self._completions,
            matching=self._matching,
            cut=self._cut,
            handed_over=self._handed_over,
            reward_min=min(rewards, default=None),
            reward_mean=math.fsum(rewards) / len(rewards) if rewards else None,
            reward_max=max(rewards, default=None),
            nodes=tuple(sorted(self._nodes)),
            policies=tuple(sorted(self._policies)),
        )
