"""The trainer's process where a CPU passes for a GPU: `python -m tests.node.ranks.cpu_for_gpu`.

Without GPUs accelerate gives its processes neither DeepSpeed nor FSDP. Here it is told that each has one, whose
device is the CPU and whose collectives are gloo's. The rest is as it is on GPUs; but no kernel is one of theirs,
nothing is computed while something else is copied, and sums are always added up in the same order.
"""

from __future__ import annotations

import importlib
import os
import runpy
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType


def prepare_backend(state: Any, *_: Any, **__: Any) -> tuple[str, DistributedType]:
    state.device = torch.device("cpu")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        # It would compile collectives of its own for CPUs, a minute of a processor. For GPUs it has none.
        backend = importlib.import_module("deepspeed.comm.torch")
        assert callable(backend.build_shm_op)
        backend.build_shm_op = lambda: None  # type: ignore[attr-defined]
    return "gloo", DistributedType.MULTI_GPU


if __name__ == "__main__":
    PartialState._prepare_backend = prepare_backend
    runpy.run_module("grpo_orch.tasks.trainer.main", run_name="__main__", alter_sys=True)
