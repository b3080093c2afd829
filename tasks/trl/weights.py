"""A trainer's weights under the names of Hugging Face's checkpoints, with and without adapters."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from peft import get_peft_model_state_dict
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

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


Named = Mapping[str, torch.Tensor]
LAYER = re.compile(r"^(.*?\.\d+)\.")


def as_in_checkpoint(model: Any, named: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return weights under the names and in the pieces of the model's own checkpoint.

    Some are other tensors there, as experts that the model holds as one tensor. They are converted a layer at a
    time, and kept until a tensor of another layer is read. A conversion of empty tensors shows which they are.
    """
    empty = {name: torch.empty(weight.shape, dtype=weight.dtype, device="meta") for name, weight in named.items()}
    stored = revert_weight_conversion(model, dict(empty))
    names = {id(tensor): name for name, tensor in empty.items()}
    found = {name: named[names[id(tensor)]] for name, tensor in stored.items() if id(tensor) in names}
    converted = {name: tensor for name, tensor in stored.items() if name not in found}
    kept = {names[id(stored[name])] for name in found}
    sources, reader = {name: tensor for name, tensor in empty.items() if name not in kept}, _Reader(model)
    for group, result in _groups(model, sources, converted):
        lazy = {name: named[name] for name in group}
        for name, tensor in result.items():
            found[name] = LazyTensor(tensor.dtype, tuple(tensor.shape), functools.partial(reader.read, lazy, name))
    return found


def _groups(model: Any, empty: Named, converted: Named) -> list[tuple[Named, Named]]:
    """Return which tensors are converted together, and the results: by layer, or all if layers give others."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in empty.items():
        layer = LAYER.match(name)
        layers.setdefault(layer[1] if layer else "", {})[name] = tensor
    results: list[tuple[Named, Named]] = [
        (layer, revert_weight_conversion(model, dict(layer))) for layer in layers.values()
    ]
    shapes = {name: tensor.shape for _, result in results for name, tensor in result.items()}
    if shapes == {name: tensor.shape for name, tensor in converted.items()}:
        return results
    return [(empty, converted)]


class _Reader:
    """Converts a group's tensors at the first read of any result, and keeps them until another group is read."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._group: Mapping[str, LazyTensor] = {}
        self._held: dict[str, torch.Tensor] = {}

    def read(self, group: Mapping[str, LazyTensor], name: str) -> torch.Tensor:
        if group is not self._group:
            self._held = {}  # free memory before the next group is read
            self._group = group
            whole = {source: weight.read() for source, weight in group.items()}
            self._held = revert_weight_conversion(self._model, whole)
        return self._held[name]
