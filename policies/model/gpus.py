"""How many GPUs a node takes, by what run.yaml says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from policies.model.spec import RunSpec, gpu_counts, processes_of
from policies.model.vocabulary import Role

VISIBLE = "CUDA_VISIBLE_DEVICES"
TOOL = "nvidia-smi"  # the driver's
OUTPUT_CHARS_MAX = 200
DRIVER_HINT = "take an image or a region with a driver that works"
# vLLM's flags for GPUs that work on one request together; their product is what one engine takes.
_TOGETHER = ("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size")


class DriverFailed(Exception):
    """The driver's tool is there and does not tell which GPUs are; the message says what it does instead."""


def driver_failed(exit_code: int, said: str) -> DriverFailed:
    """Of a tool that ended with an exit code other than 0, after it had said that."""
    line = " ".join(said.split())[:OUTPUT_CHARS_MAX]
    return DriverFailed(f"{TOOL} ends with exit code {exit_code}: {line or 'it says nothing'}")


def asks_for_gpus(role: Role, spec: RunSpec) -> bool:
    """Whether the role's machines are asked for with GPUs, which its work then uses."""
    if role is Role.TRAINER:
        return not spec.grpo.get("use_cpu") and any(gpu_counts(spec.trainer.resources))
    return any(gpu_counts(spec.rollout.resources))


def named_gpus(resources: Mapping[str, Any]) -> int | None:
    """The count in SkyPilot's `accelerators`; None where there is none, or alternatives differ in it."""
    counts = gpu_counts(resources)
    return counts.pop() if len(counts) == 1 else None


def engine_gpus(vllm: Mapping[str, Any]) -> int:
    """GPUs of one vLLM engine with these flags; what is no number of GPUs is reported with its key."""
    flags = {name.replace("_", "-"): value for name, value in vllm.items()}
    count = 1
    for name in _TOGETHER:
        value = flags.get(name)
        count *= value if isinstance(value, int) and value > 0 else 1
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


def divided(names: Sequence[str], takes: int) -> list[str]:
    """What VISIBLE is for each engine of a machine: as many engines as its GPUs suffice for, each with others. One
    that is alone has "": all that it finds.

    Args:
        names: the machine's GPUs.
        takes: how many of them one engine does.
    """
    ends = range(takes, len(names) + 1, takes)
    return [",".join(names[end - takes : end]) for end in ends] if len(ends) > 1 else [""]


def visible_names(variable: str) -> tuple[str, ...]:
    """The GPUs that the variable VISIBLE names, as CUDA reads it: up to the first that is none, each once."""
    names = (name.strip() for name in variable.split(","))
    return tuple(dict.fromkeys(takewhile(lambda name: name and not name.startswith("-"), names)))
