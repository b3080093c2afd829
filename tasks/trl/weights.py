"""A trainer's weights under the names of Hugging Face's checkpoints, with and without adapters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from peft import get_peft_model_state_dict
from torch.distributed.tensor import DTensor

from grpo_orch.tasks.storing.tensors import LazyTensor

Gathered = Callable[[list[Any]], AbstractContextManager[Any]]
FLOAT32 = 4  # bytes
ZERO_SHAPE = "ds_shape"  # DeepSpeed's: of a parameter that stage 3 has divided, as it is whole


def checkpoint_bytes(trainer: Any) -> tuple[int, int]:
    """Estimate the bytes of a checkpoint's weights and of its optimizer's state.

    AdamW keeps two values for each trained weight. DeepSpeed and FSDP save the weights in their own state as well,
    and DeepSpeed's optimizer a copy of the trained ones, all in float32.
    """
    sizes = [
        (_elements(weight), weight.element_size(), weight.requires_grad) for weight in trainer.model.parameters()
    ]
    trained = sum(count for count, _, is_trained in sizes if is_trained)
    saved = sum(count * width for count, width, _ in sizes)
    states = 2 * sum(count * width for count, width, is_trained in sizes if is_trained)
    if hasattr(trainer.model, "get_base_model"):
        saved = states // 2
    if trainer.is_deepspeed_enabled:
        return saved, saved + 3 * FLOAT32 * trained
    if trainer.is_fsdp_enabled:
        return saved, 3 * FLOAT32 * trained
    return saved, states


def _elements(weight: torch.Tensor) -> int:
    return math.prod(getattr(weight, ZERO_SHAPE, weight.shape))


def plain_model(model: Any) -> Any:
    """Return the model without adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def stored_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Return the buffers in a model's checkpoint, such as biases of routers. An engine needs them, too."""
    stored = model.state_dict().keys()
    return {name: buffer.detach().to("cpu") for name, buffer in model.named_buffers() if name in stored}


def adapter_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the trained adapter under PEFT's names. It is read at the first item."""
    yield from get_peft_model_state_dict(model, save_embedding_layers=False).items()


def whole_weights(model: Any, gathered: Gathered) -> dict[str, LazyTensor]:
    """Return a model's weights by the model's names, with adapters merged. Each is read when it is needed.

    A layer's own weights are restored after merging, since unmerging does not give the same bits and a restarted
    trainer has not merged as often. If weights are divided over processes, all processes must read the same, in
    the same order.

    Args:
        gathered: context in which parameters that ZeRO stage 3 has divided are whole.
    """
    found, seen = dict[str, LazyTensor](), set[int]()
    for path, module in model.named_modules():
        if is_adapted(module):
            for name, weight in module.get_base_layer().named_parameters(f"{path}.base_layer", recurse=False):
                seen.add(id(weight))
                found[_plain_name(name)] = _unread(weight, functools.partial(_merged, module, weight, gathered))
            continue
        for name, weight in module.named_parameters(path, recurse=False):
            if (own := _own_name(name)) is not None and id(weight) not in seen:
                seen.add(id(weight))
                found[own] = _unread(weight, functools.partial(_gathered, weight, gathered))
    return found


def _unread(weight: torch.Tensor, read: Callable[[], torch.Tensor]) -> LazyTensor:
    return LazyTensor(weight.dtype, tuple(getattr(weight, ZERO_SHAPE, weight.shape)), read)


def _gathered(weight: torch.Tensor, gathered: Gathered) -> torch.Tensor:
    with gathered([weight]):
        # ZeRO frees gathered parameters at the end of the context.
        return _whole(weight).to("cpu", copy=True) if hasattr(weight, ZERO_SHAPE) else _whole(weight)


def _merged(module: Any, weight: torch.Tensor, gathered: Gathered) -> torch.Tensor:
    """Return a weight of the layer in `module` with the adapter merged."""
    with gathered(list(module.parameters())):
        base = module.get_base_layer()
        kept = [(original, original.detach().clone()) for original in base.parameters(recurse=False)]
        module.merge()
        merged = _whole(weight).to("cpu", copy=True)
        module.unmerge()
        for original, before in kept:
            original.data.copy_(before)
    return merged


def is_adapted(module: Any) -> bool:
    """Whether a module is a layer in a PEFT adapter."""
    return hasattr(module, "get_base_layer") and hasattr(module, "merge")


def _own_name(name: str) -> str | None:
    """Return a parameter's name without parts that wrappers add; None for an adapter's or an unused parameter."""
    parts = name.split(".")
    if "original_module" in parts or "base_layer" in parts or any(part.startswith("lora_") for part in parts):
        return None
    return _plain_name(name).replace("modules_to_save.default.", "")


def _plain_name(name: str) -> str:
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    return name.replace("_checkpoint_wrapped_module.", "")


def _whole(weight: torch.Tensor) -> torch.Tensor:
    if not isinstance(weight, DTensor):
        return weight.detach()
    # NCCL gathers on the GPU only, also weights that FSDP has offloaded to the CPU.
    whole: torch.Tensor = weight.detach().to(weight.device_mesh.device_type).full_tensor()
    return whole
