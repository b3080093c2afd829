"""Whether a node computes what the trainer computes, judged by the log-probabilities of a short fixed text.

With each policy the trainer publishes them for `token_ids_for`, under the weights that it trains. A node that has
loaded the weights computes the same text and serves only if the two agree. They never agree to the bit, for the
node rounds to its own type and sums in another order: the rule says how far apart that may bring them.

This proves that the engine computes the trainer's function, whatever may go wrong between the two: a tensor that
was not published, not loaded or loaded elsewhere, a type that was misread, a layout that the reload did not
restore. It does not tell one step's weights from the next's, which differ by less than rounding does: which
version a node holds is proved by the digests of what it loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

LENGTH = 48  # tokens: 47 log-probabilities, one small prefill
FEWEST = 8  # log-probabilities that prove anything, where a node's context is shorter than the text

# The relative spacing of the numbers that matrices are multiplied in; for float32 that of TF32, which GPUs use.
# QUANTISED is measured: with weights and inputs of matrices in e4m3 the noise is 5 to 10 times that of bfloat16.
SPACING = {"float32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}
QUANTISED = "quantised"
QUANTISED_SPACING = 2.0**-5

# Noise relative to the spread of the log-probabilities, in spacings: 2 to 6 with 2 layers, 3 to 9 with 8, 3 to 14
# with 32, 5 to 13 with 64 (random models, dense and of experts, in float32 against bfloat16). It grows like a
# random walk; this is about twice the largest.
NOISE_AT_NO_DEPTH, NOISE_PER_ROOT_LAYER = 6.0, 3.0
TOLERANCE_MAX = 0.5  # two unrelated models differ by more than 1
# Rounding that makes a router choose another expert changes single tokens a lot: the worst eighth is left out, and
# with it all may be three times as far off.
OUTLIERS = 8
OUTLIERS_TOLERANCE = 3.0
SPREAD_MIN = 0.01  # nats; where all tokens are alike to a model, only the last bits of the logarithm differ


@dataclass(frozen=True, slots=True)
class Canary:
    """A fixed text as the trainer computes it.

    Attributes:
        token_ids: the text.
        logprobs: natural logarithms of the probability of `token_ids[1:]`, each after all before it, at
            temperature 1; None where the trainer's is not a number.
        dtype: what the trainer computes in, as in SPACING.
        layers: of the model.
        unused: regular expressions of tensors that may be in the base model's files and that the trainer's model
            has no use for, as transformers names them.
    """

    token_ids: list[int]
    logprobs: list[float | None]
    dtype: str
    layers: int
    unused: list[str] = field(default_factory=list)


def token_ids_for(vocabulary: int) -> list[int]:
    """A text of `LENGTH` tokens from all over the vocabulary, but for its ends, where special tokens are."""
    first, last = vocabulary // 16, max(vocabulary * 7 // 8, vocabulary // 16 + 1)
    count = last - first
    stride = round(count * (math.sqrt(5) - 1) / 2)  # by the golden section tokens stay far from each other
    while math.gcd(stride, count) != 1:
        stride += 1
    return [first + (number * stride) % count for number in range(1, LENGTH + 1)]


def tolerance(trainer: str, node: str, layers: int) -> float:
    """How far a node's log-probabilities may be from the trainer's, relative to the spread of the trainer's.

    Args:
        trainer, node: the types that they compute in; an unknown one counts as quantised.
        layers: of the model.
    """
    spacing = math.hypot(*(SPACING.get(dtype, QUANTISED_SPACING) for dtype in (trainer, node)))
    return min(spacing * (NOISE_AT_NO_DEPTH + NOISE_PER_ROOT_LAYER * math.sqrt(layers)), TOLERANCE_MAX)


def disagreement(canary: Canary, logprobs: Sequence[float], dtype: str) -> str:
    """Why the node does not compute what the trainer does, in a line; empty where it does.

    Args:
        logprobs: the node's, of the tokens after the first; fewer than the trainer's where its context ends.
        dtype: what the node computes in, as in SPACING, or QUANTISED.
    """
    theirs = [one for one in canary.logprobs[: len(logprobs)] if one is not None and math.isfinite(one)]
    if len(theirs) < len(logprobs):
        return "the trainer's own log-probabilities are not numbers"
    if len(theirs) < FEWEST:
        return f"{len(theirs)} log-probabilities prove nothing; it takes {FEWEST}"
    if not all(math.isfinite(one) for one in logprobs):
        return "the node's log-probabilities are not numbers"
    mean = sum(theirs) / len(theirs)
    spread = max(_root_mean_square([one - mean for one in theirs]), SPREAD_MIN)
    apart = sorted(abs(our - their) / spread for our, their in zip(logprobs, theirs, strict=True))
    most = _root_mean_square(apart[: len(apart) - len(apart) // OUTLIERS])
    every = _root_mean_square(apart)
    allowed = tolerance(canary.dtype, dtype, canary.layers)
    if most <= allowed and every <= OUTLIERS_TOLERANCE * allowed:
        return ""
    return (
        f"its log-probabilities of {len(apart)} tokens are {most:.2g} of their spread from the trainer's,"
        f" {every:.2g} with the worst; {dtype} against {canary.dtype} with {canary.layers} layers explains"
        f" {allowed:.2g}"
    )


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))
