"""Whether the tensors of a policy are those that a node's engine expects, by their names, shapes and types.

The engine expects what the base model's own files hold, for it was started on them. vLLM itself loads what it
recognises, leaves out the rest, and reads bytes of any type as numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # any of them is converted; safetensors' names
ADAPTERS = re.compile(r"(^base_model\.model\.|\.base_layer\.|\blora_|\.modules_to_save\.)")
# What bitsandbytes and others keep beside weights that they have packed.
PACKED = re.compile(r"\.(absmax|nested_absmax|quant_map|nested_quant_map|quant_state\..*|SCB|weight_format)$")
# Computed from the configuration, and in the files of older checkpoints only.
COMPUTED = re.compile(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)$")
HEAD = re.compile(r"(^|\.)lm_head\.weight$")
PREFIXES = ("", "model.", "transformer.")  # some base models' files leave them out


@dataclass(frozen=True, slots=True)
class Tensor:
    """What the header of a safetensors file says of one."""

    dtype: str
    shape: tuple[int, ...]


def mismatch(
    published: Mapping[str, Tensor], base: Mapping[str, Tensor], *, tied: bool = False, unused: Iterable[str] = ()
) -> str:
    """Why the published tensors are not those of the base model, in a line that names one; empty where they are.

    Args:
        base: empty where its files are not at hand: then only what is plainly no weight is found.
        tied: whether the head is the embedding, so that it may be missing.
        unused: regular expressions of base tensors that the trainer's model does not have.
    """
    names = base_names(base, published)
    for name in sorted(published):
        ours, theirs = published[name], base.get(names[name])
        if reason := _foreign(name, ours, theirs):
            return reason
        if base and theirs is None and not (tied and HEAD.search(name)):
            return f"a tensor that the model does not have: {name}"
        if theirs is not None and ours.shape != theirs.shape:
            return f"another shape: {name} is {list(ours.shape)}, the model's is {list(theirs.shape)}"
    may_miss = [COMPUTED, *(re.compile(one) for one in unused), *([HEAD] if tied else [])]
    absent = sorted(base.keys() - set(names.values()))
    missing = [name for name in absent if not any(one.search(name) for one in may_miss)]
    if missing:
        return f"missing tensors: {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
    return ""


def _foreign(name: str, tensor: Tensor, in_base: Tensor | None) -> str:
    """Why it is no plain weight; empty where it is, or where the base model itself has such."""
    if in_base is None and ADAPTERS.search(name):
        return f"unmerged adapters: {name}"
    if in_base is None and PACKED.search(name):
        return f"quantised weights: {name}"
    if tensor.dtype not in FLOATS and (in_base is None or in_base.dtype != tensor.dtype):
        return f"quantised weights: {name} is of {tensor.dtype}"
    return ""


def base_names(base: Mapping[str, Tensor], published: Mapping[str, Tensor]) -> dict[str, str]:
    """The published tensors' names as the base model's files have them."""
    found = {prefix: sum(name.removeprefix(prefix) in base for name in published) for prefix in PREFIXES}
    prefix = max(PREFIXES, key=lambda one: found[one])  # no prefix if they are equal
    return {name: name if name in base else name.removeprefix(prefix) for name in published}
