"""How many GPUs a node takes, by what run.yaml says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from policies.model.spec import RunSpec, processes_of
from policies.model.vocabulary import Role

# vLLM's flags for GPUs that work on one request together; their product is what one engine takes.
_TOGETHER = ("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size")


def named_gpus(resources: Mapping[str, Any]) -> int | None:
    """The count in SkyPilot's `accelerators`: `H100:8`, `H100`, `{H100: 8}`, or a list of alternatives.

    None where there is none, or alternatives, those of `any_of` and `ordered` too, differ in it.
    """
    nested = [one for key in ("any_of", "ordered") for one in resources.get(key) or ()]
    counts = {count for one in (nested or [resources]) for count in _counts({**resources, **one})}
    return counts.pop() if len(counts) == 1 else None


def engine_gpus(vllm: Mapping[str, Any]) -> int:
    """GPUs of one vLLM engine with these flags."""
    flags = {name.replace("_", "-"): value for name, value in vllm.items()}
    count = 1
    for name in _TOGETHER:
        count *= int(flags.get(name) or 1)
    return count


def gpus_of(role: Role, spec: RunSpec) -> int:
    """GPUs of a node where they are divided: what is named, else one for each process of the trainer's, and what
    an engine takes. None with `use_cpu`, unless they are named."""
    named = named_gpus(spec.trainer.resources if role is Role.TRAINER else spec.rollout.resources)
    if named is not None:
        return named
    if spec.grpo.get("use_cpu"):
        return 0
    return processes_of(spec) if role is Role.TRAINER else engine_gpus(spec.rollout.vllm)


def _counts(resources: Mapping[str, Any]) -> Iterator[int | None]:
    accelerators = resources.get("accelerators")
    if isinstance(accelerators, Mapping):
        accelerators = [f"{name}:{count}" for name, count in accelerators.items()]
    elif isinstance(accelerators, str):
        accelerators = [accelerators]
    for one in accelerators or (None,):
        yield None if one is None else _count(one)


def _count(text: str) -> int | None:
    """Of `NAME` or `NAME:COUNT`; None for what is no count of GPUs, which is SkyPilot's to judge."""
    name, _, count = text.partition(":")
    if name.lower().startswith("tpu") or (count and not count.isdecimal()):
        return None
    return int(count or 1)
