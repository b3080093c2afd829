"""Read samples from a store: list steps, select completions, and convert them to JSON.

Used by the command and the web page. Read-only; texts are as stored. A step here is the step that first trained on
a completion: one after the step of the policy that generated it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from grpo_orch.checkpoint.records.samples import Group, Head, Message, Sample, read_samples, stored_calls
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import PolicyVersion

NEAREST = 3  # steps suggested if the requested step has no samples
EXPECTED = "expected a step, or TIMELINE-STEP as in 0-121"
_STEP = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,12})")
_LINK = re.compile(r"([0-9]{1,9})-([0-9]{1,12})/([0-9]{1,9})/([0-9]{1,9})")


class NoSamples(Exception):
    """The requested samples do not exist. The message is one line and names what exists."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has samples."""

    timeline: int
    step: int
    keys: tuple[str, ...]  # of its sample objects, in the order of scoring

    def __str__(self) -> str:
        return f"{self.timeline}-{self.step}"


@dataclass(frozen=True, slots=True)
class Link:
    """Identifies a completion, as TIMELINE-STEP/GROUP/INDEX; group and index count from 0.

    Stable as long as the step's samples are kept.
    """

    step: str
    group: int
    index: int

    def __str__(self) -> str:
        return f"{self.step}/{self.group}/{self.index}"

    @classmethod
    def parse(cls, text: str) -> Link:
        """Parse the output of `str()`. Raises NoSamples for anything else."""
        found = _LINK.fullmatch(text)
        if found is None:
            raise NoSamples(
                f"{text[:100]!r} is not a completion: expected TIMELINE-STEP/GROUP/INDEX as in 0-121/3/0"
            )
        return cls(f"{int(found[1])}-{int(found[2])}", int(found[3]), int(found[4]))


def stored_steps(store: Store) -> list[Step]:
    """Return all steps with samples, sorted by timeline and step. Raises StoreError."""
    calls = stored_calls(store)
    return [Step(policy.timeline, policy.step + 1, tuple(calls[policy])) for policy in sorted(calls)]


def find_step(steps: Sequence[Step], text: str = "") -> Step:
    """Return the step that `text` names, on the newest timeline that has it; the newest for an empty text.

    Raises NoSamples.
    """
    if not text and steps:
        return steps[-1]
    found = _STEP.fullmatch(text)
    if found is None or not steps:
        raise NoSamples(f"{text[:100]!r} is not a step: {EXPECTED}" if found is None else "no step has samples")
    timeline, number = found[1], int(found[2])
    for step in reversed(steps):
        if step.step == number and (timeline is None or step.timeline == int(timeline)):
            return step

    def distance(step: Step) -> tuple[bool, int]:
        return timeline is not None and step.timeline != int(timeline), abs(step.step - number)

    nearest = sorted(sorted(steps, key=distance)[:NEAREST], key=lambda step: (step.timeline, step.step))
    raise NoSamples(f"no samples of step {text}; the nearest are {', '.join(map(str, nearest))}")


def no_samples_reason(store: Store) -> str:
    """Return the reason why a run has no samples. Raises StoreError."""
    if next(iter(store.entries(layout.ROLLOUTS)), None) is None:
        return "no step has been scored yet"
    return "the run has no samples: its steps have not been scored yet, or their samples could not be stored"


def groups_of(store: Store, step: Step) -> Iterator[tuple[int, Head, Group]]:
    """Yield the step's groups with their numbers, decoding one at a time. Raises NotFound, Corrupt."""
    number = 0
    for key in step.keys:
        head, groups = read_samples(store, key)
        for group in groups:
            yield number, head, group
            number += 1


def policy_of(step: Step) -> PolicyVersion:
    """Return the policy that generated the step's completions."""
    return PolicyVersion(step.timeline, step.step - 1)


# Selecting completions by text, reward, node and policy, and sorting them by reward.


class SortOrder(StrEnum):
    """The order of completions. Those without a reward come last."""

    STORED = "stored"
    WORST = "worst"
    BEST = "best"


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """A filter of completions; empty and None match all.

    `search` is found in the completion or its prompt, ignoring case.
    """

    search: str = ""
    reward_min: float | None = None
    reward_max: float | None = None
    node: str = ""
    policy: str = ""
    cut: bool | None = None
    handed_over: bool | None = None


@dataclass(frozen=True, slots=True)
class FoundSample:
    """A completion and its place in the step."""

    link: Link
    head: Head
    group: Group
    sample: Sample


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of all completions of a step."""

    prompts: int
    completions: int
    matching: int  # that the filter matches
    cut: int
    handed_over: int
    reward_min: float | None
    reward_mean: float | None
    reward_max: float | None
    nodes: tuple[str, ...]
    policies: tuple[str, ...]


def select(
    step: Step,
    groups: Iterable[tuple[int, Head, Group]],
    wanted: SampleFilter,
    order: SortOrder,
    count: int,
    first: int = 0,
) -> tuple[list[FoundSample], Summary]:
    """Return `count` matching completions, skipping the `first` ones, and a summary of all completions.

    Raises the errors of `groups`. A step's samples are at most 32 Mi characters.
    """
    found = list(_all(step, groups))
    matching = [item for item in found if _matches(item, wanted)]
    if order is not SortOrder.STORED:
        sign = 1 if order is SortOrder.WORST else -1
        matching.sort(key=lambda item: _rank(item, sign))
    return matching[first : first + count], _summary(found, len(matching))


def _summary(found: Sequence[FoundSample], matching: int) -> Summary:
    samples = [item.sample for item in found]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    return Summary(
        prompts=len({item.link.group for item in found}),
        completions=len(samples),
        matching=matching,
        cut=sum(sample.cut is True for sample in samples),
        handed_over=sum(bool(sample.handed_over) for sample in samples),
        reward_min=min(rewards, default=None),
        reward_mean=math.fsum(rewards) / len(rewards) if rewards else None,
        reward_max=max(rewards, default=None),
        nodes=tuple(sorted({sample.node for sample in samples} - {""})),
        policies=tuple(sorted({_version(sample) for sample in samples} - {""})),
    )


def _matches(item: FoundSample, wanted: SampleFilter) -> bool:
    sample = item.sample
    if wanted.reward_min is not None and (sample.reward is None or sample.reward < wanted.reward_min):
        return False
    if wanted.reward_max is not None and (sample.reward is None or sample.reward > wanted.reward_max):
        return False
    choices = (
        (wanted.node, {sample.node, *(part.node for part in sample.handed_over)}),
        (wanted.policy, {sample.policy, _version(sample)}),
    )
    if any(value and value not in values for value, values in choices):
        return False
    if wanted.cut is not None and sample.cut is not wanted.cut:
        return False
    if wanted.handed_over is not None and bool(sample.handed_over) is not wanted.handed_over:
        return False
    search = wanted.search.casefold()
    messages = (*sample.completion, *item.group.prompt)
    return not search or any(search in message.text.casefold() for message in messages)


def _version(sample: Sample) -> str:
    return sample.policy.partition("@")[0]  # the label also names the artifact


def _rank(item: FoundSample, sign: int) -> tuple[bool, float]:
    reward = item.sample.reward
    return reward is None, 0.0 if reward is None else sign * reward


def _all(step: Step, groups: Iterable[tuple[int, Head, Group]]) -> Iterator[FoundSample]:
    for number, head, group in groups:
        for index, sample in enumerate(group.samples):
            yield FoundSample(Link(str(step), number, index), head, group, sample)


# JSON data, for programs and templates.


def completion_plain(item: FoundSample) -> dict[str, Any]:
    """Return a completion as JSON data, without its prompt."""
    sample = item.sample
    return {
        "link": str(item.link),
        "group": item.link.group,
        "index": item.link.index,
        "reward": sample.reward,
        "rewards": [
            {"function": name, "weight": weight, "reward": reward}
            for name, weight, reward in zip(item.head.functions, item.head.weights, sample.rewards, strict=False)
        ],
        "advantage": sample.advantage,
        "tokens": sample.tokens,
        "cut": sample.cut,
        "node": sample.node,
        "policy": sample.policy,
        "handed_over": [asdict(part) for part in sample.handed_over],
        "mismatch_mean": sample.mismatch_mean,
        "mismatch_max": sample.mismatch_max,
        "refused": sample.refused,
        "failed": sample.failed,
        "completion": messages_plain(sample.completion),
    }


def messages_plain(messages: list[Message]) -> list[dict[str, Any]]:
    """Return a prompt or completion as JSON data; `left_out` characters are missing before the last `after`."""
    return [asdict(message) for message in messages]


def summary_plain(step: Step, summary: Summary) -> dict[str, Any]:
    """Return a step and its summary as JSON data."""
    return {"step": str(step), "policy": str(policy_of(step)), **asdict(summary)}
