"""A step over tensors without content that allocates what it would on a GPU, on a machine that has none.

Three things differ there. Logits are folded by Triton kernels, in place, and products are added up without a copy
in float32: here the kernels do nothing. Only completions are scored: which tokens these are is content, so their
number is told. And what is read of a tensor is 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import trl.kernels.chunked_logprob as kernels
import trl.trainer.utils as trl_utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten


class _NoKernel:
    """In the place of a Triton kernel: `kernel[grid](...)`."""

    def __getitem__(self, _grid: Any) -> Any:
        return lambda *_args, **_kwargs: None


class _Told(TorchDispatchMode):
    """Answers what only content would tell."""

    def __init__(self, scored: int) -> None:
        super().__init__()
        self._scored = scored

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ATEN._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else args[0].dtype != torch.bool or True
        if func is ATEN.masked_select.default:
            return args[0].new_empty((self._scored,))
        if func is ATEN.index.Tensor:
            masks = [one for one in args[1] if one is not None and one.dtype == torch.bool]
            if masks:
                return args[0].new_empty((self._scored, *args[0].shape[masks[0].dim() :]))
        return func(*args, **(kwargs or {}))


@contextmanager
def without_content(scored: int) -> Iterator[None]:
    """Within, tensors have no content.

    Args:
        scored: completion tokens of a batch.
    """
    # Modules are where they should be already; torch would put others into their place.
    stay = patch.object(torch.nn.Module, "to", lambda self, *_args, **_kwargs: self)
    with stay, FakeTensorMode(allow_non_fake_inputs=True), _Told(scored):
        yield


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Within, TRL's head takes the way that it takes on a GPU."""
    with ExitStack() as stack:
        for module in (kernels, trl_utils):
            stack.enter_context(patch.object(module, "_use_triton", lambda _device: True))
        for name in ("_forward_kernel", "_backward_kernel"):
            stack.enter_context(patch.object(kernels, name, _NoKernel()))
        stack.enter_context(patch.object(kernels, "_addmm_fp32", lambda *_: None))
        yield
