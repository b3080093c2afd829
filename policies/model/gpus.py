"""The GPUs of a node and of an engine, from run.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from grpo_orch.policies.model.spec import RunSpec, gpu_counts, processes_of
from grpo_orch.policies.model.vocabulary import Role

VISIBLE = "CUDA_VISIBLE_DEVICES"
TOOL = "nvidia-smi"  # the driver's
OUTPUT_CHARS_MAX = 200
DRIVER_HINT = "use an image or a region with a working driver"
# vLLM's flags for GPUs that work on one request together; an engine takes their product.
_PARALLEL_SIZES = ("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size")


class DriverFailed(Exception):
    """The driver's tool exists and fails to list the GPUs; the message has the reason."""


def driver_failed(exit_code: int, output: str) -> DriverFailed:
    """Return the error for a tool that ended with a non-zero exit code and this output."""
    line = " ".join(output.split())[:OUTPUT_CHARS_MAX]
    return DriverFailed(f"{TOOL} ends with exit code {exit_code}: {line or 'no output'}")


def requests_gpus(role: Role, spec: RunSpec) -> bool:
    """Whether the role's machines are requested with GPUs and its work uses them."""
    if role is Role.TRAINER:
        return not spec.grpo.get("use_cpu") and any(gpu_counts(spec.trainer.resources))
    return any(gpu_counts(spec.rollout.resources))


def named_gpus(resources: Mapping[str, Any]) -> int | None:
    """Return the count in SkyPilot's `accelerators`; None without one, or if alternatives differ."""
    counts = gpu_counts(resources)
    return counts.pop() if len(counts) == 1 else None


def engine_gpus(vllm: Mapping[str, Any]) -> int:
    """Return the GPUs of one vLLM engine with these flags. Invalid values count as 1; others report them."""
    flags = {name.replace("_", "-"): value for name, value in vllm.items()}
    count = 1
    for name in _PARALLEL_SIZES:
        value = flags.get(name)
        count *= value if isinstance(value, int) and value > 0 else 1
    return count


def gpus_of(role: Role, spec: RunSpec) -> int:
    """Return the GPUs of a node: the named count, else one for each training process, or those of one engine.

    0 with `use_cpu`, unless they are named.
    """
    named = named_gpus(spec.trainer.resources if role is Role.TRAINER else spec.rollout.resources)
    if named is not None:
        return named
    if spec.grpo.get("use_cpu"):
        return 0
    return processes_of(spec) if role is Role.TRAINER else engine_gpus(spec.rollout.vllm)


def engine_devices(names: Sequence[str], takes: int) -> list[str]:
    """Return VISIBLE for each engine of a machine, as many engines as its GPUs suffice for.

    A single engine gets "": all GPUs.

    Args:
        names: the machine's GPUs.
        takes: GPUs of one engine.
    """
    ends = range(takes, len(names) + 1, takes)
    return [",".join(names[end - takes : end]) for end in ends] if len(ends) > 1 else [""]


def visible_names(variable: str) -> tuple[str, ...]:
    """Return the GPUs in the variable VISIBLE, as CUDA reads it: up to the first invalid name, each once."""
    names = (name.strip() for name in variable.split(","))
    return tuple(dict.fromkeys(takewhile(lambda name: name and not name.startswith("-"), names)))
