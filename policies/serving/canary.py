"""Check that a node computes what the trainer computes, by the log-probabilities of a short fixed text.

With each policy the trainer publishes the log-probabilities of `token_ids_for` under its own weights. A node that
has loaded the weights computes the same text, and serves only if the two agree. They never agree to the bit,
because the node rounds to its own type and sums in another order; the tolerance says how much that may differ.

This proves that the engine computes the trainer's function. It catches tensors that were not published, not loaded
or loaded into the wrong place, misread types, and layouts that a reload did not restore. It cannot distinguish one
step's weights from the next's, which differ by less than rounding; the digests of the loaded weights do that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

LENGTH = 48  # tokens: 47 log-probabilities, one small prefill
TOKENS_MIN = 8  # log-probabilities needed for a check, where a node's context is shorter than the text

# Relative spacing of the numbers in matrix products; for float32 that of TF32, which GPUs use. QUANTISED is
# measured: with weights and inputs in e4m3 the noise is 5 to 10 times that of bfloat16.
SPACING = {"float32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}
QUANTISED = "quantised"
QUANTISED_SPACING = 2.0**-5

# Noise relative to the spread of the log-probabilities, in spacings: 2 to 6 with 2 layers, 3 to 9 with 8, 3 to 14
# with 32, 5 to 13 with 64 (random models, dense and of experts, in float32 against bfloat16). It grows like a
# random walk; this is about twice the largest.
NOISE_AT_NO_DEPTH, NOISE_PER_ROOT_LAYER = 6.0, 3.0
TOLERANCE_MAX = 0.5  # two unrelated models differ by more than 1
# Rounding that makes a router choose another expert changes single tokens a lot. So the worst eighth is left out,
# and the difference with it may be three times as large.
OUTLIERS = 8
OUTLIERS_TOLERANCE = 3.0
SPREAD_MIN = 0.01  # nats; if a model finds all tokens equally likely, only the logarithm's last bits differ


@dataclass(frozen=True, slots=True)
class Canary:
    """A fixed text with the trainer's log-probabilities.

    Attributes:
        token_ids: the text.
        logprobs: natural logarithms of the probability of each of `token_ids[1:]` given those before it, at
            temperature 1; None where the trainer's is not a number.
        dtype: the type that the trainer computes in, as in SPACING.
        layers: of the model.
        unused: regular expressions of tensors that the base model's files may have and the trainer's model does
            not use, by transformers' names.
    """

    token_ids: list[int]
    logprobs: list[float | None]
    dtype: str
    layers: int
    unused: list[str] = field(default_factory=list)


def token_ids_for(vocabulary: int) -> list[int]:
    """Return `LENGTH` tokens from the whole vocabulary except its ends, where special tokens are."""
    first, last = vocabulary // 16, max(vocabulary * 7 // 8, vocabulary // 16 + 1)
    count = last - first
    stride = round(count * (math.sqrt(5) - 1) / 2)  # the golden ratio keeps tokens far from each other
    while math.gcd(stride, count) != 1:
        stride += 1
    return [first + (number * stride) % count for number in range(1, LENGTH + 1)]


def tolerance(trainer: str, node: str, layers: int) -> float:
    """Return how far a node's log-probabilities may be from the trainer's, relative to their spread.

    Args:
        trainer, node: the types that they compute in; an unknown type counts as quantised.
        layers: of the model.
    """
    spacing = math.hypot(*(SPACING.get(dtype, QUANTISED_SPACING) for dtype in (trainer, node)))
    return min(spacing * (NOISE_AT_NO_DEPTH + NOISE_PER_ROOT_LAYER * math.sqrt(layers)), TOLERANCE_MAX)


def disagreement(canary: Canary, logprobs: Sequence[float], dtype: str) -> str:
    """Return why the node does not compute what the trainer does, in one line; empty if it does.

    Args:
        logprobs: the node's, of the tokens after the first; fewer than the trainer's if its context is shorter.
        dtype: the type that the node computes in, as in SPACING, or QUANTISED.
    """
    expected = [
        logprob for logprob in canary.logprobs[: len(logprobs)] if logprob is not None and math.isfinite(logprob)
    ]
    if len(expected) < len(logprobs):
        return "the trainer's own log-probabilities are not numbers"
    if len(expected) < TOKENS_MIN:
        return f"{len(expected)} log-probabilities are too few to compare; at least {TOKENS_MIN} are needed"
    if not all(math.isfinite(logprob) for logprob in logprobs):
        return "the node's log-probabilities are not numbers"
    mean = sum(expected) / len(expected)
    spread = max(_root_mean_square([logprob - mean for logprob in expected]), SPREAD_MIN)
    differences = sorted(abs(ours - theirs) / spread for ours, theirs in zip(logprobs, expected, strict=True))
    without_worst = _root_mean_square(differences[: len(differences) - len(differences) // OUTLIERS])
    overall = _root_mean_square(differences)
    allowed = tolerance(canary.dtype, dtype, canary.layers)
    if without_worst <= allowed and overall <= OUTLIERS_TOLERANCE * allowed:
        return ""
    return (
        f"its log-probabilities of {len(differences)} tokens differ from the trainer's by {without_worst:.2g} of"
        f" their spread, {overall:.2g} with the worst; {dtype} against {canary.dtype} with {canary.layers} layers"
        f" explains {allowed:.2g}"
    )


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))
