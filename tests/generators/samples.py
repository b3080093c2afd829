"""A step's samples as a trainer stores them."""

from __future__ import annotations

from grpo_orch.checkpoint.records import samples
from grpo_orch.checkpoint.records.samples import Group, Head, Message, Sample
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.serving.wire import Handover


def sample(text: str, reward: float | None = 1.0, **given: object) -> Sample:
    told = {
        "advantage": 0.5,
        "tokens": 7,
        "cut": False,
        "node": "rollout-0-i1",
        "policy": "0-4@0123456789abcdef",
        **given,
    }
    return Sample([Message(text, "assistant")], [reward, None], reward, **told)  # type: ignore[arg-type]  # by name


def handed_over(text: str, reward: float | None = 0.5) -> Sample:
    left = [Handover("rollout-1-i1", 3)]
    return sample(text, reward, handed_over=left, mismatch_mean=0.01, mismatch_max=0.25)


def group(prompt: str, *made: Sample) -> Group:
    return Group([Message(prompt, "user")], list(made))


def store_step(store: Store, policy: str, *groups: Group, call: int = 0) -> None:
    """As the trainer does once it has scored the completions of `policy`."""
    timeline, step = map(int, policy.split("-"))
    head = Head(samples.SCHEMA, policy, step + 1, call, 1.0, ["correct", "brief"], [1.0, 0.5], len(groups))
    samples.write_samples(store, head, groups, (timeline, 1, 1))
