"""Whether the tensors of a published adapter are two matrices each for layers that the base model has.

PEFT saves them as `base_model.model.LAYER.lora_A.weight` (rank x inputs) and `.lora_B.weight` (outputs x rank).
vLLM itself leaves out what it does not find in its model, and takes any rank up to its largest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from policies.weights.tensors import FLOATS, Tensor

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


def adapter_mismatch(
    published: Mapping[str, Tensor], config: Mapping[str, Any], base: Mapping[str, Tensor], engine_rank: int
) -> str:
    """Why the tensors are no adapter for the base model, in a line that names one; empty where they are.

    Args:
        config: adapter_config.json.
        base: the base model's tensors. One that is not there is not compared, for transformers names some models'
            layers otherwise than their files do: the engine then says whether it has the layer.
        engine_rank: the largest that the engine has room for.
    """
    layers: dict[str, dict[str, Tensor]] = {}
    for name in sorted(published):
        found = _NAME.fullmatch(name)
        if found is None:
            return f"a tensor that is none of an adapter's: {name}"
        if published[name].dtype not in FLOATS:
            return f"quantised weights: {name} is of {published[name].dtype}"
        layers.setdefault(found[1], {})[found[2]] = published[name]
    if not layers:
        return "the adapter has no tensors"
    for layer, pair in layers.items():
        if reason := _unfit(layer, pair, config, base.get(f"{layer}.weight"), engine_rank):
            return reason
    return ""


def _unfit(
    layer: str, pair: Mapping[str, Tensor], config: Mapping[str, Any], weight: Tensor | None, engine_rank: int
) -> str:
    """Why a layer's two matrices are not those of the configuration and of its weight; empty where they are."""
    if pair.keys() != {"A", "B"}:
        return f"missing tensors: half of the adapter of {layer}"
    inner, outer = pair["A"].shape, pair["B"].shape
    rank = _rank_of(layer, config)
    if len(inner) != 2 or len(outer) != 2 or (inner[0], outer[1]) != (rank, rank):
        return f"another rank: {layer} has {list(inner)} and {list(outer)}, adapter_config.json says {rank}"
    if rank > engine_rank:
        return f"another rank: {layer} has {rank}, the engine has room for {engine_rank}"
    if weight is not None and weight.shape not in ((outer[0], inner[1]), (inner[1], outer[0])):
        return f"another shape: {layer} is adapted as {[outer[0], inner[1]]}, the model's is {list(weight.shape)}"
    return ""


def _rank_of(layer: str, config: Mapping[str, Any]) -> Any:
    """As PEFT and vLLM read the pattern: a key matches the end of a layer's name, and the first one counts."""
    for key, rank in (config.get("rank_pattern") or {}).items():
        if re.match(rf"(.*\.)?({key})$", layer):
            return rank
    return config.get("r")
