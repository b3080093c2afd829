"""A trainer's weights as Hugging Face's checkpoints count and name them, with and without adapters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from peft import get_peft_model_state_dict
from torch.distributed.tensor import DTensor

from tasks.storing.tensors import Unread

Gathered = Callable[[list[Any]], AbstractContextManager[Any]]
FLOAT32 = 4  # bytes
ZERO_SHAPE = "ds_shape"  # DeepSpeed's: of a parameter that stage 3 has divided, as it is whole


def checkpoint_bytes(trainer: Any) -> tuple[int, int]:
    """About how much a checkpoint's weights and its optimizer's state will take.

    AdamW keeps two values for each weight that is trained. What DeepSpeed and FSDP go on from has the weights,
    too, and DeepSpeed's optimizer a copy of its own of those that it trains; both keep theirs in float32.
    """
    sizes = [(_elements(one), one.element_size(), one.requires_grad) for one in trainer.model.parameters()]
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
    """The model itself, without the adapters around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def stored_buffers(model: Any) -> dict[str, torch.Tensor]:
    """What a model's checkpoint holds besides its parameters, such as the biases of some routers: an engine that
    loads the one without the other does not keep the other."""
    stored = model.state_dict().keys()
    return {name: one.detach().to("cpu") for name, one in model.named_buffers() if name in stored}


def adapter_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapter that is trained, under the names by which PEFT saves it; read when the first is taken."""
    yield from get_peft_model_state_dict(model, save_embedding_layers=False).items()


def whole_weights(model: Any, gathered: Gathered) -> dict[str, Unread]:
    """A model's weights, whole once they are read, with adapters merged, under the names that the model has.

    What a layer was merged into is put back: merging adapters and taking them out again does not give back the
    same bits, and a restart has not done it as often. Where the weights are divided over processes, all of them
    have to read the same ones in the same order.

    Args:
        gathered: within it, parameters that ZeRO stage 3 has divided are whole.
    """
    found, seen = dict[str, Unread](), set[int]()
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


def _unread(weight: torch.Tensor, read: Callable[[], torch.Tensor]) -> Unread:
    return Unread(weight.dtype, tuple(getattr(weight, ZERO_SHAPE, weight.shape)), read)


def _gathered(weight: torch.Tensor, gathered: Gathered) -> torch.Tensor:
    with gathered([weight]):
        # What ZeRO has gathered is good for a moment alone.
        return _whole(weight).to("cpu", copy=True) if hasattr(weight, ZERO_SHAPE) else _whole(weight)


def _merged(module: Any, weight: torch.Tensor, gathered: Gathered) -> torch.Tensor:
    """A weight of the layer in `module`, an adapter's, as it is with the adapter merged."""
    with gathered(list(module.parameters())):
        kept = [(one, one.detach().clone()) for one in module.get_base_layer().parameters(recurse=False)]
        module.merge()
        merged = _whole(weight).to("cpu", copy=True)
        module.unmerge()
        for one, before in kept:
            one.data.copy_(before)
    return merged


def is_adapted(module: Any) -> bool:
    """Whether it is a layer with an adapter of PEFT's around it."""
    return hasattr(module, "get_base_layer") and hasattr(module, "merge")


def _own_name(name: str) -> str | None:
    """A parameter's name without what wrappers add; None for what is of an adapter, or stands unused beside it."""
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
    # What FSDP keeps in the machine's memory is gathered where it computes: NCCL knows no other place.
    found: torch.Tensor = weight.detach().to(weight.device_mesh.device_type).full_tensor()
    return found
