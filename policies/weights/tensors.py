"""Check that a policy's tensors are those that a node's engine expects, by names, shapes and types.

The engine expects the tensors of the base model's files, on which it was started. vLLM itself loads the tensors it
recognises, ignores the rest, and reads bytes of any type as numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # types that can be converted; safetensors' names
ADAPTERS = re.compile(r"(^base_model\.model\.|\.base_layer\.|\blora_|\.modules_to_save\.)")
# Tensors that bitsandbytes and others store with packed weights.
PACKED = re.compile(r"\.(absmax|nested_absmax|quant_map|nested_quant_map|quant_state\..*|SCB|weight_format)$")
# Computed from the configuration, and only in the files of older checkpoints.
COMPUTED = re.compile(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)$")
HEAD = re.compile(r"(^|\.)lm_head\.weight$")
PREFIXES = ("", "model.", "transformer.")  # some base models' files omit them


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's entry in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]


def mismatch(
    published: Mapping[str, Tensor], base: Mapping[str, Tensor], *, tied: bool = False, unused: Iterable[str] = ()
) -> str:
    """Return why the published tensors do not match the base model's, naming one; empty if they do.

    Args:
        base: empty if its files are unavailable: then only tensors that are clearly no weights are found.
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
            return f"wrong shape: {name} is {list(ours.shape)}, the model's is {list(theirs.shape)}"
    optional = [COMPUTED, *(re.compile(pattern) for pattern in unused), *([HEAD] if tied else [])]
    absent = sorted(base.keys() - set(names.values()))
    missing = [name for name in absent if not any(pattern.search(name) for pattern in optional)]
    if missing:
        return f"missing tensors: {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
    return ""


def _foreign(name: str, tensor: Tensor, in_base: Tensor | None) -> str:
    """Return why a tensor is no plain weight; empty if it is, or if the base model has the same kind."""
    if in_base is None and ADAPTERS.search(name):
        return f"unmerged adapters: {name}"
    if in_base is None and PACKED.search(name):
        return f"quantised weights: {name}"
    if tensor.dtype not in FLOATS and (in_base is None or in_base.dtype != tensor.dtype):
        return f"quantised weights: {name} is of {tensor.dtype}"
    return ""


def base_names(base: Mapping[str, Tensor], published: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of the published tensors in the base model's files."""
    counts = {prefix: sum(name.removeprefix(prefix) in base for name in published) for prefix in PREFIXES}
    prefix = max(PREFIXES, key=lambda candidate: counts[candidate])  # no prefix if equal
    return {name: name if name in base else name.removeprefix(prefix) for name in published}


# The types in which weights are published: those of the nodes' engines, where these are certain.
#
# vLLM rounds loaded weights to one type, its `dtype`, as torch's `Tensor.to` does. Weights that are rounded before
# publishing give the same result, are half as large, and keep most of their bits from step to step. vLLM keeps
# wider types for vectors, for matrices that the base model's files have in wider types too, and for a few small
# matrices that it widens in any case. All these are published unchanged.

WIDTH = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes
# As vLLM 0.32 reads its flag (`config/model.py`), in safetensors' names.
NAMED = {"half": "F16", "float16": "F16", "bfloat16": "BF16", "float": "F32", "float32": "F32"}
# Float32 in vLLM for many models (`GateLinear`, `mamba_mixer.py`, `bailing_moe_v3.py`): routers, state matrices,
# short convolutions.
WIDENED = re.compile(r"(^|\.)((gate|router|classifier|[qkv]_conv1d)\.weight|A_log)$")
# With these the engine may hold other types than its dtype.
UNCERTAIN = ("quantization", "hf-overrides", "hf-config-path", "model-impl")
UNCERTAIN_IN_CONFIG = ("quantization_config", "head_dtype")


@dataclass(frozen=True, slots=True)
class ServedTypes:
    """The types in which tensors are published.

    Attributes:
        to: the type that engines round to; None if unknown.
        own: the base model's own type.
        base: the tensors of its files; empty if unavailable.
    """

    to: str | None = None
    own: str | None = None
    base: Mapping[str, Tensor] = field(default_factory=dict)

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Return the type of each tensor by name: its own, or a narrower one."""
        names = base_names(self.base, tensors)
        return {
            name: tensor.dtype if WIDENED.search(name) else self._of(tensor, self.base.get(names[name]))
            for name, tensor in tensors.items()
        }

    def _of(self, tensor: Tensor, in_base: Tensor | None) -> str:
        if self.to is None or tensor.dtype not in FLOATS or len(tensor.shape) < 2:
            return tensor.dtype
        if in_base is not None and not self._is_rounded(in_base):
            return tensor.dtype
        return self.to if WIDTH[self.to] < WIDTH[tensor.dtype] else tensor.dtype

    def _is_rounded(self, in_base: Tensor) -> bool:
        """Whether engines round it to their own type."""
        return in_base.dtype in FLOATS and (self.own is None or WIDTH[in_base.dtype] <= WIDTH[self.own])


def served_types(
    flags: Mapping[str, Any], config: Mapping[str, Any], base: Mapping[str, Tensor] | None = None
) -> ServedTypes:
    """Return the types of a run's engines from vLLM's flags and the base model's config.json.

    `auto` is the configuration's type; float32 then becomes bfloat16, as on GPUs since Ampere and on CPUs. Older
    GPUs compute in float16, for which run.yaml needs `dtype: half`.
    """
    set_flags = {name.replace("_", "-"): value for name, value in flags.items() if value is not None}
    if any(name in set_flags for name in UNCERTAIN) or any(key in config for key in UNCERTAIN_IN_CONFIG):
        return ServedTypes()
    text = config.get("text_config") or {}
    dtypes = (section.get(key) for section in (config, text) for key in ("dtype", "torch_dtype"))
    own = NAMED.get(str(next((dtype for dtype in dtypes if dtype), "")).removeprefix("torch."))
    dtype = str(set_flags.get("dtype", "auto")).lower()
    to = {"F32": "BF16"}.get(own or "", own) if dtype == "auto" else NAMED.get(dtype)
    return ServedTypes(to, own, base or {})
