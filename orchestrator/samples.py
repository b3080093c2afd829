"""The samples in a store: which steps have some, which completions a reader wants, and their JSON.

For the command and the page alike. Nothing here writes, and texts are as they were stored. A step here is the one
in which a completion was trained on first: one after that of the policy which generated it.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from checkpoint.records.samples import Group, Head, Message, Sample, read_samples, stored_calls
from checkpoint.store import layout
from checkpoint.store.run_store import Store
from policies.model.vocabulary import PolicyVersion

NEAREST = 3  # steps that are named where one is missing
WANTED = "expected a step, or TIMELINE-STEP as in 0-121"
_STEP = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,12})")
_LINK = re.compile(r"([0-9]{1,9})-([0-9]{1,12})/([0-9]{1,9})/([0-9]{1,9})")


class NoSamples(Exception):
    """What was asked for is not there; the message is one line and says what is."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has samples."""

    timeline: int
    step: int
    keys: tuple[str, ...]  # its scorings, in their order

    def __str__(self) -> str:
        return f"{self.timeline}-{self.step}"


@dataclass(frozen=True, slots=True)
class Link:
    """One completion, printed TIMELINE-STEP/GROUP/INDEX, both counted from 0. It means the same as long as the
    step's samples are kept."""

    step: str
    group: int
    index: int

    def __str__(self) -> str:
        return f"{self.step}/{self.group}/{self.index}"

    @classmethod
    def parse(cls, text: str) -> Link:
        """Read what `str()` printed. Raises NoSamples for anything else."""
        found = _LINK.fullmatch(text)
        if found is None:
            raise NoSamples(
                f"{text[:100]!r} names no completion: expected TIMELINE-STEP/GROUP/INDEX as in 0-121/3/0"
            )
        return cls(f"{int(found[1])}-{int(found[2])}", int(found[3]), int(found[4]))


def stored_steps(store: Store) -> list[Step]:
    """All steps with samples, by timeline and step. Raises StoreError."""
    calls = stored_calls(store)
    return [Step(policy.timeline, policy.step + 1, tuple(calls[policy])) for policy in sorted(calls)]


def find_step(steps: Sequence[Step], text: str = "") -> Step:
    """The step that `text` names, of the newest timeline that has it; else the newest. Raises NoSamples."""
    if not text and steps:
        return steps[-1]
    named = _STEP.fullmatch(text)
    if named is None or not steps:
        raise NoSamples(f"{text[:100]!r} names no step: {WANTED}" if named is None else "no step has samples")
    timeline, step = named[1], int(named[2])
    for one in reversed(steps):
        if one.step == step and (timeline is None or one.timeline == int(timeline)):
            return one
    near = sorted(
        steps, key=lambda one: (timeline is not None and one.timeline != int(timeline), abs(one.step - step))
    )
    named_near = ", ".join(map(str, sorted(near[:NEAREST], key=lambda one: (one.timeline, one.step))))
    raise NoSamples(f"no samples of step {text}; the nearest are {named_near}")


def why_none(store: Store) -> str:
    """Why a run whose steps have no samples has none. Raises StoreError."""
    if next(iter(store.entries(layout.ROLLOUTS)), None) is None:
        return "no step has been scored yet"
    return "the run has no samples: its steps have not been scored yet, or their samples could not be stored"


def groups_of(store: Store, step: Step) -> Iterator[tuple[int, Head, Group]]:
    """The step's groups with their numbers, decoded one at a time. Raises NotFound, Corrupt."""
    number = 0
    for key in step.keys:
        head, groups = read_samples(store, key)
        for group in groups:
            yield number, head, group
            number += 1


def policy_of(step: Step) -> PolicyVersion:
    """Whose completions the step's are."""
    return PolicyVersion(step.timeline, step.step - 1)


# Choosing completions by words, reward, node and version; the worst, the best.


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


# As JSON's own types, for programs and templates.


def completion_plain(one: Found) -> dict[str, Any]:
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
        "failed": sample.failed,
        "completion": messages_plain(sample.completion),
    }


def messages_plain(told: list[Message]) -> list[dict[str, Any]]:
    """A prompt or a completion; `left_out` characters are missing before the last `after` of a text."""
    return [asdict(one) for one in told]


def summary_plain(step: Step, told: Summary) -> dict[str, Any]:
    """A step and what its completions have in common."""
    return {"step": str(step), "policy": str(policy_of(step)), **asdict(told)}
