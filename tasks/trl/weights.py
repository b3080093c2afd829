"""A trainer's weights as Hugging Face's checkpoints count and name them, with and without adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from peft import get_peft_model_state_dict
from torch.distributed.tensor import DTensor


def checkpoint_bytes(trainer: Any) -> tuple[int, int]:
    """About how much a checkpoint's weights and its optimizer's state will take: AdamW keeps two values for each
    weight that is trained."""
    trained = sum(weight.nbytes for weight in trainer.model.parameters() if weight.requires_grad)
    adapted = hasattr(trainer.model, "get_base_model")
    saved = trained if adapted else sum(weight.nbytes for weight in trainer.model.parameters())
    return saved, 2 * trained


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


def whole_weights(
    model: Any, gathered: Callable[[list[Any]], AbstractContextManager[Any]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's weights, whole, with its adapters merged, under the names that the model itself gives them.

    One layer at a time, and what a layer was merged into is put back before the next: merging adapters and taking
    them out again does not give back the same bits, and a restart has not done it as often. Each tensor is good
    until the next is taken. Where the weights are divided over processes, all of them have to take all.

    Args:
        gathered: within it, parameters that ZeRO stage 3 has divided are whole.
    """
    seen = set[int]()
    for path, module in model.named_modules():
        if not is_adapted(module):
            for name, weight in module.named_parameters(path, recurse=False):
                if (found := _own_name(name)) is not None and id(weight) not in seen:
                    seen.add(id(weight))
                    with gathered([weight]):
                        yield found, _whole(weight)
            continue
        base = module.get_base_layer()
        with gathered(list(module.parameters())):
            kept = [(weight, weight.detach().clone()) for weight in base.parameters(recurse=False)]
            module.merge()
            for name, weight in base.named_parameters(f"{path}.base_layer", recurse=False):
                seen.add(id(weight))
                yield _plain_name(name), _whole(weight)
            module.unmerge()
            for weight, before in kept:
                weight.data.copy_(before)


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
