"""How long a step takes, before anyone has measured one. Estimates, and said to be so.

Two limits of a GPU are asked for, and the slower counts (the roofline, Williams et al. 2009): bytes that it has
to read, and operations that it has to make. A forward pass is 2 operations a parameter and token, a backward pass
4: 2 for the gradients of what each layer was given, 2 for those of its weights (Kaplan et al., arXiv 2001.08361).
Attention adds to a pass what grows with a sequence's length: a few per cent at a thousand tokens, several times
the rest at 100,000. A padded batch has a mask, with which kernels compute what lies above the diagonal, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

# GPUs by SkyPilot's names: their memory, how fast they read it, and how fast they multiply.
#
# Memory is what NVIDIA's driver reports (`nvidia-smi`, MiB), a little less than the name on the box. Bandwidth and
# dense bfloat16 throughput are those of NVIDIA's data sheets, without sparsity; float16's for what is older than
# Ampere and has no bfloat16. What runs reach of them is below.

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


# Of a GPU's dense throughput in training. Published large runs reach 0.38 to 0.43 (Llama 3, arXiv 2407.21783) with
# kernels and batches made for it; TRL pads its completions and runs plain transformers. An assumption.
MFU = 0.3
# Of its bandwidth while tokens are generated, and of its throughput there. Assumptions, too.
BANDWIDTH_SHARE = 0.7
GENERATION_MFU = 0.4
# transformers' own generate() starts each kernel from Python: an assumption.
EAGER_LAYER_S = 0.001
GB = 10**9
TERA = 10**12


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one optimizer step takes; fractions where several steps share what was generated.

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
    """What the trainer computes of each token, beside the forward pass that is always there."""

    all_weights: bool  # they are trained, and not an adapter beside them
    recomputed: bool  # gradient checkpointing: the forward pass is made again on the way back
    reference: bool  # the reference model's log-probabilities, where beta is above 0
    old: bool  # the log-probabilities under the policy that generated, where they are computed anew

    @property
    def flops_per_param(self) -> int:
        """Operations for each parameter and token: 6 for weights that are trained, and nothing else."""
        return 4 + 2 * (self.all_weights + self.recomputed + self.reference + self.old)

    @property
    def attention_passes(self) -> int:
        """How many forward passes attention takes the time of: a backward pass that of two."""
        return 3 + self.recomputed + self.reference + self.old


@dataclass(frozen=True, slots=True)
class Engine:
    """What generates: one vLLM engine, or the trainer's own process.

    Attributes:
        gpus: that work on one request together.
        bandwidth_gb_per_s: of one of them.
        tflops: of one of them.
        weights_bytes: over all of them, read once for each token of a batch.
        kv_bytes: of one token, over all of them.
        params: that a token goes through: of a mixture of experts the active ones.
        sequences_max: that fit at a time; None: as many as come.
        token_floor_s: the least that one token of a batch takes, for reasons of software.
        experts_bytes: of `weights_bytes`, those of experts. A token reads `experts_share` of them, and a batch
            those that any of its tokens was sent to.
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
    """Seconds of one optimizer step on `gpus` GPUs, at MFU.

    Args:
        params: that a token goes through.
        attention_flops: of one forward pass's attention, for each token and token of its sequence.
    """
    length = work.prompt_tokens + work.completion_tokens
    each = passes.flops_per_param * params + passes.attention_passes * attention_flops * length
    return each * work.trained_tokens / (gpus * tflops * TERA * MFU)


def generate_s(engine: Engine, work: StepWork, engines: int) -> float:
    """Seconds until the step's completions are there, from so many engines alike, each of full length.

    Reading the weights takes as long for one sequence as for many: more engines help only with what grows with the
    sequences.
    """
    sequences = math.ceil(work.generated / engines)
    at_once = min(sequences, max(1, engine.sequences_max or sequences))
    rounds = math.ceil(sequences / at_once)
    flops_per_s = engine.gpus * engine.tflops * TERA * GENERATION_MFU
    prefill_s = 2 * engine.params * work.prompts / engines * work.prompt_tokens / flops_per_s
    return prefill_s + rounds * work.completion_tokens * token_s(engine, work, at_once)


def shared_by_nodes(engine: Engine, work: StepWork, engines: int) -> tuple[float, float]:
    """Return generation as `policies.fleet` divides it: the seconds that no further node shortens, and the
    node-seconds that nodes share, a node having so many engines.

    The first is one completion by itself.
    """
    floor_s = work.completion_tokens * token_s(engine, work, 1)
    return floor_s, max(0.0, generate_s(engine, work, engines) - floor_s)


def token_s(engine: Engine, work: StepWork, sequences: int) -> float:
    """Seconds for the next token of each of so many sequences, in the middle of their completions."""
    context = work.prompt_tokens + work.completion_tokens / 2
    idle_bytes = engine.experts_bytes * (1 - engine.experts_share) ** sequences  # by experts chosen evenly
    read_bytes = engine.weights_bytes - idle_bytes + sequences * context * engine.kv_bytes
    read_s = read_bytes / (engine.gpus * engine.bandwidth_gb_per_s * GB * BANDWIDTH_SHARE)
    compute_s = 2 * engine.params * sequences / (engine.gpus * engine.tflops * TERA * GENERATION_MFU)
    return max(read_s, compute_s, engine.token_floor_s)


# How long new weights take from the optimizer's step until an engine may take them, by their form.
#
# By the arithmetic of docs/benchmarks.md (Weights), with its rates: `send` and `fetch` are a transfer each, for
# nodes read what the trainer wrote into the store; a delta is found by going through all weights.

LINKS_GBIT_PER_S = (10, 25, 100)
# Measured (docs/benchmarks.md), one core; its arithmetic has 8 of them on each side.
ENCODE_BYTES_PER_S = 1.0 * GB
PROVE_BYTES_PER_S = 2.0 * GB
CORES = 8
# Measured there: learning rate, bytes of a delta as a share of the whole, AdamW with float32 masters.
DELTAS = ((5e-7, 0.0106), (1e-6, 0.0178), (1e-5, 0.097))


def delta_share(learning_rate: float) -> float:
    """Bytes of a delta of bfloat16 weights as a share of the whole, at most 1.

    Between measured learning rates, and beyond them, by the power that joins the two nearest.
    """
    if learning_rate <= 0:
        return 0.0
    upper = next((at for at in range(1, len(DELTAS)) if learning_rate <= DELTAS[at][0]), len(DELTAS) - 1)
    (rate, share), (next_rate, next_share) = DELTAS[upper - 1], DELTAS[upper]
    power = math.log(next_share / share) / math.log(next_rate / rate)
    return min(1.0, share * float((learning_rate / rate) ** power))


def whole_s(weights_bytes: float, gbit_per_s: float) -> float:
    """Seconds for all of it, an adapter's file too: encode, send, fetch, prove."""
    encode_s, prove_s = _encode_s(weights_bytes), weights_bytes / (CORES * PROVE_BYTES_PER_S)
    return encode_s + 2 * _link_s(weights_bytes, gbit_per_s) + prove_s


def delta_s(weights_bytes: float, share: float, gbit_per_s: float) -> float:
    """Seconds for what changed: sent while it is encoded, fetched, applied to all of the weights and proved."""
    send_s, apply_s = _link_s(share * weights_bytes, gbit_per_s), weights_bytes / (CORES * PROVE_BYTES_PER_S)
    return max(_encode_s(weights_bytes), send_s) + send_s + apply_s


def _encode_s(weights_bytes: float) -> float:
    return weights_bytes / (CORES * ENCODE_BYTES_PER_S)


def _link_s(size_bytes: float, gbit_per_s: float) -> float:
    return size_bytes / (gbit_per_s * GB / 8)
