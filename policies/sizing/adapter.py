"""How large a LoRA adapter is: two matrices a linear layer (arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Iterator

from policies.sizing.shapes import Linear, Shape
from policies.sizing.training import Lora


def adapter_params(shape: Shape, lora: Lora) -> int:
    """Elements of the adapter: rank x (inputs + outputs) for each layer that it is on.

    Experts are no linear layers to PEFT: transformers keeps them in one tensor for all.
    """
    sparse = shape.experts.layers if shape.experts else 0
    attention = sum(_of(one, lora) for one in adapted(shape.attention, lora))
    mlp = sum(_of(one, lora) for one in adapted(shape.mlp, lora))
    return shape.layers * attention + (shape.layers - sparse) * mlp


def adapted(layers: tuple[Linear, ...], lora: Lora | None) -> Iterator[Linear]:
    """Those of the linear layers that have an adapter."""
    return (one for one in layers if lora is not None and one.name in lora.targets)


def _of(layer: Linear, lora: Lora) -> int:
    return lora.rank * (layer.inputs + layer.outputs)
