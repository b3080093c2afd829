"""How long a step takes, before anyone has measured one. Estimates, and said to be so.

Two limits of a GPU are asked for, and the slower counts (the roofline, Williams et al. 2009): bytes that it has
to read, and operations that it has to make. A forward pass is 2 operations a parameter and token, a backward pass
4: 2 for the gradients of what each layer was given, 2 for those of its weights (Kaplan et al., arXiv 2001.08361).
Attention adds to a pass what grows with a sequence's length: a few per cent at a thousand tokens, several times
the rest at 100,000. A padded batch has a mask, with which kernels compute what lies above the diagonal, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
