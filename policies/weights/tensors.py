"""Whether the tensors of a policy are those that a node's engine expects, by their names, shapes and types.

The engine expects what the base model's own files hold, for it was started on them. vLLM itself loads what it
recognises, leaves out the rest, and reads bytes of any type as numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

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


# In which types weights are published: those that the nodes' engines hold them in, where that is certain.
#
# vLLM rounds what it loads to one type, its `dtype`, as torch's `Tensor.to` does. Weights that are rounded before
# they are published come out the same, are half as large, and keep most of their bits from step to step. What vLLM
# itself keeps wider are vectors, matrices that the base model's own files have wider too, and a few small ones
# that it widens, whatever those files say: all these are left as they are.

WIDTH = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes
# As vLLM 0.32 reads its flag (`config/model.py`), in safetensors' names.
NAMED = {"half": "F16", "float16": "F16", "bfloat16": "BF16", "float": "F32", "float32": "F32"}
# Float32 in vLLM for many models (`GateLinear`, `mamba_mixer.py`, `bailing_moe_v3.py`): routers, state matrices,
# short convolutions.
WIDENED = re.compile(r"(^|\.)((gate|router|classifier|[qkv]_conv1d)\.weight|A_log)$")
# With these the engine may hold something else than its dtype says.
UNCERTAIN = ("quantization", "hf-overrides", "hf-config-path", "model-impl")
UNCERTAIN_IN_CONFIG = ("quantization_config", "head_dtype")


@dataclass(frozen=True, slots=True)
class ServedTypes:
    """Which type each tensor is published in.

    Attributes:
        to: what engines round to; None where it is not known.
        own: the base model's own type.
        base: its tensors, as its files have them; empty where they are not at hand.
    """

    to: str | None = None
    own: str | None = None
    base: Mapping[str, Tensor] = field(default_factory=dict)

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """The type of each tensor by name: its own, or a narrower one."""
        names = base_names(self.base, tensors)
        return {
            name: one.dtype if WIDENED.search(name) else self._of(one, self.base.get(names[name]))
            for name, one in tensors.items()
        }

    def _of(self, tensor: Tensor, in_base: Tensor | None) -> str:
        if self.to is None or tensor.dtype not in FLOATS or len(tensor.shape) < 2:
            return tensor.dtype
        if in_base is not None and not self._is_rounded(in_base):
            return tensor.dtype
        return self.to if WIDTH[self.to] < WIDTH[tensor.dtype] else tensor.dtype

    def _is_rounded(self, in_base: Tensor) -> bool:
        """Whether engines keep it no wider than their own type."""
        return in_base.dtype in FLOATS and (self.own is None or WIDTH[in_base.dtype] <= WIDTH[self.own])


def served_types(
    flags: Mapping[str, Any], config: Mapping[str, Any], base: Mapping[str, Tensor] | None = None
) -> ServedTypes:
    """Return what a run's engines hold, given vLLM's flags and the base model's config.json.

    `auto` is the configuration's type; float32 then becomes bfloat16, as on GPUs since Ampere and on CPUs. On
    older ones, which compute in float16, `dtype: half` in run.yaml says so.
    """
    given = {name.replace("_", "-"): value for name, value in flags.items() if value is not None}
    if any(name in given for name in UNCERTAIN) or any(one in config for one in UNCERTAIN_IN_CONFIG):
        return ServedTypes()
    text = config.get("text_config") or {}
    kinds = (one.get(key) for one in (config, text) for key in ("dtype", "torch_dtype"))
    own = NAMED.get(str(next((kind for kind in kinds if kind), "")).removeprefix("torch."))
    asked = str(given.get("dtype", "auto")).lower()
    to = {"F32": "BF16"}.get(own or "", own) if asked == "auto" else NAMED.get(asked)
    return ServedTypes(to, own, base or {})
