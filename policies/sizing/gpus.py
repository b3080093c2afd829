"""GPUs by SkyPilot's names: their memory, how fast they read it, and how fast they multiply.

Memory is what NVIDIA's driver reports (`nvidia-smi`, MiB), a little less than the name on the box. Bandwidth and
dense bfloat16 throughput are those of NVIDIA's data sheets, without sparsity; float16's for what is older than
Ampere and has no bfloat16. What runs reach of them is in `speed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind. `has_bf16`: whether it computes in bfloat16 (Ampere and later)."""

    name: str
    memory_mib: int
    bandwidth_gb_per_s: float
    tflops: float
    has_bf16: bool = True

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * MIB


GPUS: tuple[Gpu, ...] = (
    Gpu("T4", 15_360, 320, 65, has_bf16=False),
    Gpu("V100", 16_384, 900, 125, has_bf16=False),
    Gpu("V100-32GB", 32_768, 900, 125, has_bf16=False),
    Gpu("L4", 23_034, 300, 121),
    Gpu("A10G", 23_028, 600, 70),
    Gpu("A10", 23_028, 600, 125),
    Gpu("RTX3090", 24_576, 936, 71),
    Gpu("RTX4090", 24_564, 1008, 165),
    Gpu("RTX5090", 32_607, 1792, 209),
    Gpu("A100", 40_960, 1555, 312),
    Gpu("L40S", 46_068, 864, 362),
    Gpu("L40", 46_068, 864, 181),
    Gpu("RTXA6000", 49_140, 768, 155),
    Gpu("A100-80GB", 81_920, 2039, 312),
    Gpu("H100", 81_559, 3350, 989),
    Gpu("GH200", 97_871, 4000, 989),
    Gpu("H200", 143_771, 4800, 989),
    Gpu("B200", 183_359, 8000, 2250),
)
_BY_NAME: Mapping[str, Gpu] = {one.name.lower(): one for one in GPUS}


def gpu_named(name: str) -> Gpu | None:
    """The kind that SkyPilot calls so, in any case of letters; None for one that is not in the table."""
    return _BY_NAME.get(name.lower())
