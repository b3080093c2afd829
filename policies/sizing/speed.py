"""Estimate how long a step takes, before any was measured.

The slower of two limits of a GPU counts (the roofline, Williams et al. 2009): bytes to read, and operations. A
forward pass is 2 operations a parameter and token, a backward pass 4: 2 for the gradients of each layer's input, 2
for those of its weights (Kaplan et al., arXiv 2001.08361). Attention adds a part that grows with a sequence's
length: a few per cent at a thousand tokens, several times the rest at 100,000. A padded batch has a mask, with
which kernels also compute the part above the diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

# GPUs by SkyPilot's names, with memory, bandwidth and throughput.
#
# Memory as NVIDIA's driver reports it (`nvidia-smi`, MiB), a little less than the nominal size. Bandwidth and
# dense bfloat16 throughput are from NVIDIA's data sheets, without sparsity; float16's for GPUs older than Ampere,
# which have no bfloat16. The shares that runs reach are below.

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU model. `has_bf16`: whether it computes in bfloat16 (Ampere and later)."""

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
_BY_NAME: Mapping[str, Gpu] = {gpu.name.lower(): gpu for gpu in GPUS}


def gpu_named(name: str) -> Gpu | None:
    """Return the GPU with this SkyPilot name, ignoring case; None if it is not in the table."""
    return _BY_NAME.get(name.lower())


# Share of a GPU's dense throughput in training. Published large runs reach 0.38 to 0.43 (Llama 3, arXiv
# 2407.21783) with optimized kernels and batches; TRL pads its completions and runs plain transformers. An
# assumption.
MFU = 0.3
# Shares of its bandwidth and throughput in generation. Assumptions, too.
BANDWIDTH_SHARE = 0.7
GENERATION_MFU = 0.4
# transformers' own generate() starts each kernel from Python: an assumption.
EAGER_LAYER_S = 0.001
GB = 10**9
TERA = 10**12


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one optimizer step; fractions if several steps share a generation.

    Attributes:
        generated: completions generated for it.
        trained: completions that it trains on, over all processes.
        prompts: different prompts among `generated`.
        prompt_tokens: of one prompt.
        completion_tokens: of one completion.
    """

    generated: float
    trained: float
    prompts: float
    prompt_tokens: float
    completion_tokens: float

    @property
    def trained_tokens(self) -> float:
        return self.trained * (self.prompt_tokens + self.completion_tokens)


@dataclass(frozen=True, slots=True)
class Passes:
    """The trainer's computations for each token, in addition to the forward pass."""

    all_weights: bool  # all weights are trained, instead of an adapter
    recomputed: bool  # gradient checkpointing: the forward pass is repeated in the backward pass
    reference: bool  # the reference model's log-probabilities, where beta is above 0
    old: bool  # the log-probabilities under the policy that generated, where they are recomputed

    @property
    def flops_per_param(self) -> int:
        """Operations for each parameter and token: 6 for trained weights and nothing else."""
        return 4 + 2 * (self.all_weights + self.recomputed + self.reference + self.old)

    @property
    def attention_passes(self) -> int:
        """Time of attention in forward passes; a backward pass counts as two."""
        return 3 + self.recomputed + self.reference + self.old


@dataclass(frozen=True, slots=True)
class Engine:
    """A vLLM engine, or the trainer's own process when it generates.

    Attributes:
        gpus: that work on one request together.
        bandwidth_gb_per_s: of each GPU.
        tflops: of each GPU.
        weights_bytes: over all GPUs, read once for each token of a batch.
        kv_bytes: of one token, over all GPUs.
        params: used by a token: in a mixture of experts the active ones.
        sequences_max: that fit at a time; None: no limit.
        token_floor_s: minimum time for one token of a batch, due to software.
        experts_bytes: of `weights_bytes`, those of experts. A token reads `experts_share` of them.
    """

    gpus: int
    bandwidth_gb_per_s: float
    tflops: float
    weights_bytes: float
    kv_bytes: float
    params: float
    sequences_max: int | None = None
    token_floor_s: float = 0.0
    experts_bytes: float = 0.0
    experts_share: float = 1.0


def train_s(
    params: float, work: StepWork, passes: Passes, gpus: int, tflops: float, attention_flops: float = 0.0
) -> float:
    """Return the seconds of one optimizer step on `gpus` GPUs, at MFU.

    Args:
        params: used by a token.
        attention_flops: of one forward pass's attention, for each token and token of its sequence.
    """
    length = work.prompt_tokens + work.completion_tokens
    token_flops = passes.flops_per_param * params + passes.attention_passes * attention_flops * length
    return token_flops * work.trained_tokens / (gpus * tflops * TERA * MFU)


def generate_s(engine: Engine, work: StepWork, engines: int) -> float:
    """Return the seconds to generate the step's completions, all of full length, with `engines` equal engines.

    Reading the weights takes as long for one sequence as for many, so more engines help only with the part that
    grows with the number of sequences.
    """
    sequences = math.ceil(work.generated / engines)
    batch = min(sequences, max(1, engine.sequences_max or sequences))
    rounds = math.ceil(sequences / batch)
    flops_per_s = engine.gpus * engine.tflops * TERA * GENERATION_MFU
    prefill_s = 2 * engine.params * work.prompts / engines * work.prompt_tokens / flops_per_s
    return prefill_s + rounds * work.completion_tokens * token_s(engine, work, batch)


def shared_by_nodes(engine: Engine, work: StepWork, engines: int) -> tuple[float, float]:
    """Split generation for `policies.fleet`, with `engines` engines a node.

    Return the seconds that no further node shortens, those of one completion alone, and the node-seconds that
    nodes share.
    """
    floor_s = work.completion_tokens * token_s(engine, work, 1)
    return floor_s, max(0.0, generate_s(engine, work, engines) - floor_s)


def token_s(engine: Engine, work: StepWork, sequences: int) -> float:
    """Return the seconds for the next token of each of `sequences` sequences, in mid-completion."""
    context = work.prompt_tokens + work.completion_tokens / 2
    idle_bytes = engine.experts_bytes * (1 - engine.experts_share) ** sequences  # if experts are chosen evenly
    read_bytes = engine.weights_bytes - idle_bytes + sequences * context * engine.kv_bytes
    read_s = read_bytes / (engine.gpus * engine.bandwidth_gb_per_s * GB * BANDWIDTH_SHARE)
    compute_s = 2 * engine.params * sequences / (engine.gpus * engine.tflops * TERA * GENERATION_MFU)
    return max(read_s, compute_s, engine.token_floor_s)


# Time from an optimizer step until an engine may load the new weights, in each format.
#
# By the calculation of docs/benchmarks.md (Weights), with its rates: `send` and `fetch` are one transfer each,
# since nodes read from the store what the trainer wrote there; finding a delta scans all weights.

LINKS_GBIT_PER_S = (10, 25, 100)
# Measured on one core (docs/benchmarks.md), which assumes 8 cores on each side.
ENCODE_BYTES_PER_S = 1.0 * GB
PROVE_BYTES_PER_S = 2.0 * GB
CORES = 8
# Measured there: learning rate, bytes of a delta as a share of the whole, AdamW with float32 masters.
DELTAS = ((5e-7, 0.0106), (1e-6, 0.0178), (1e-5, 0.097))


def delta_share(learning_rate: float) -> float:
    """Return the bytes of a delta of bfloat16 weights as a share of the whole, at most 1.

    Interpolated and extrapolated by a power law through the two nearest measured learning rates.
    """
    if learning_rate <= 0:
        return 0.0
    upper = next((at for at in range(1, len(DELTAS)) if learning_rate <= DELTAS[at][0]), len(DELTAS) - 1)
    (rate, share), (next_rate, next_share) = DELTAS[upper - 1], DELTAS[upper]
    power = math.log(next_share / share) / math.log(next_rate / rate)
    return min(1.0, share * float((learning_rate / rate) ** power))


def full_transfer_s(weights_bytes: float, gbit_per_s: float) -> float:
    """Return the seconds for whole weights, or an adapter: encode, send, fetch, verify."""
    encode_s, prove_s = _encode_s(weights_bytes), weights_bytes / (CORES * PROVE_BYTES_PER_S)
    return encode_s + 2 * _link_s(weights_bytes, gbit_per_s) + prove_s


def delta_transfer_s(weights_bytes: float, share: float, gbit_per_s: float) -> float:
    """Return the seconds for a delta: send while encoding, fetch, apply to all weights and verify."""
    send_s, apply_s = _link_s(share * weights_bytes, gbit_per_s), weights_bytes / (CORES * PROVE_BYTES_PER_S)
    return max(_encode_s(weights_bytes), send_s) + send_s + apply_s


def _encode_s(weights_bytes: float) -> float:
    return weights_bytes / (CORES * ENCODE_BYTES_PER_S)


def _link_s(size_bytes: float, gbit_per_s: float) -> float:
    return size_bytes / (gbit_per_s * GB / 8)
