"""How large a LoRA adapter is: two matrices a linear layer (arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Iterator

from policies.sizing.shapes import Linear, Shape
from policies.sizing.training import Lora, Training


def adapter_params(shape: Shape, lora: Lora) -> int:
    """Elements of the adapter: rank x (inputs + outputs) for each layer that it is on.

    Experts are no linear layers to PEFT: transformers keeps them in one tensor for all.
    """
    sparse = shape.experts.layers if shape.experts else 0
    attention = sum(_of(one, lora) for one in adapted(shape.attention, lora))
    mlp = sum(_of(one, lora) for one in adapted(shape.mlp, lora))
    return shape.layers * attention + (shape.layers - sparse) * mlp


def copied_params(shape: Shape, lora: Lora) -> int:
    """Elements of the base model's own matrices that are trained beside the adapter, each in a copy."""
    layers = (*shape.attention, *shape.mlp)
    ends = shape.embedding_params * len(lora.whole & {"lm_head", "embed_tokens"})
    return ends + shape.layers * sum(one.params for one in layers if one.name in lora.whole)


def trained_params(shape: Shape, training: Training) -> int:
    """How many parameters the optimizer changes."""
    lora = training.lora
    return shape.params if lora is None else adapter_params(shape, lora) + copied_params(shape, lora)


def adapted(layers: tuple[Linear, ...], lora: Lora | None) -> Iterator[Linear]:
    """Those of the linear layers that have an adapter."""
    return (one for one in layers if lora is not None and one.name in lora.targets)


def _of(layer: Linear, lora: Lora) -> int:
    return lora.rank * (layer.inputs + layer.outputs)
