"""The rule by which a node's log-probabilities are the trainer's, on numbers made up and on noise as measured."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_orch.policies.serving.canary import (
    LENGTH,
    QUANTISED,
    TOKENS_MIN,
    TOLERANCE_MAX,
    Canary,
    disagreement,
    token_ids_for,
    tolerance,
)

THEIRS = [-6.0 + 2.0 * math.sin(number * 2.4) for number in range(LENGTH - 1)]
SPREAD = 2.0 / math.sqrt(2.0)


def canary(dtype: str = "float32", layers: int = 2, logprobs: list[float | None] | None = None) -> Canary:
    return Canary(token_ids_for(1000), [*THEIRS] if logprobs is None else logprobs, dtype, layers)


def apart(by: float, share: float = 1.0) -> list[float]:
    """THEIRS, off by `by` of the spread in the root mean square, at a share of the places in turn."""
    chance = random.Random(7)
    every = max(round(1 / share), 1)
    return [
        one + (SPREAD * by * chance.choice((-1, 1)) if number % every == 0 else 0.0)
        for number, one in enumerate(THEIRS)
    ]


@pytest.mark.parametrize(
    ("by", "trainer", "node", "layers", "agrees"),
    [
        # Measured noise, the largest of three random models of each depth.
        (1e-5, "float32", "float32", 2, True),
        (0.022, "float32", "bfloat16", 2, True),
        (0.026, "bfloat16", "bfloat16", 2, True),
        (0.034, "float32", "bfloat16", 8, True),
        (0.054, "float32", "bfloat16", 32, True),
        (0.064, "bfloat16", "bfloat16", 32, True),
        (0.051, "float32", "bfloat16", 64, True),
        (0.48, "float32", QUANTISED, 32, True),
        # The weakest matrix of a model with two layers, permuted.
        (0.18, "float32", "float32", 2, False),
        (0.18, "float32", "bfloat16", 2, False),
        (0.18, "bfloat16", "bfloat16", 2, False),
        # Another model altogether.
        (1.0, "bfloat16", "bfloat16", 94, False),
        (1.0, "bfloat16", QUANTISED, 94, False),
        (1.0, "float8", "a type that nobody knows", 94, False),
    ],
)
def test_noise_is_let_through_and_another_function_is_not(
    by: float, trainer: str, node: str, layers: int, agrees: bool
) -> None:
    said = disagreement(canary(trainer, layers), apart(by), node)
    assert (said == "") is agrees, said
    if not agrees:
        assert f"{node} against {trainer}" in said


def test_router_may_change_experts_for_few_tokens_only() -> None:
    within = tolerance("float32", "bfloat16", 8)
    assert disagreement(canary(layers=8), apart(within * 5, share=0.1), "bfloat16") == ""
    assert disagreement(canary(layers=8), apart(within * 5, share=0.25), "bfloat16") != ""
    assert disagreement(canary(layers=8), apart(within * 20, share=0.1), "bfloat16") != ""


@pytest.mark.parametrize(
    ("theirs", "ours", "why"),
    [
        ([*THEIRS[:-1], None], THEIRS, "the trainer's own log-probabilities are not numbers"),
        (THEIRS, [*THEIRS[:-1], math.nan], "the node's log-probabilities are not numbers"),
        (THEIRS, [*THEIRS[:-1], -math.inf], "the node's log-probabilities are not numbers"),
        (THEIRS, THEIRS[: TOKENS_MIN - 1], "too few to compare"),
        (THEIRS, [], "too few to compare"),
        (THEIRS[:10], THEIRS, "the trainer's own log-probabilities are not numbers"),
    ],
)
def test_invalid_proof_is_refused(theirs: list[float | None], ours: list[float], why: str) -> None:
    assert why in disagreement(canary(logprobs=theirs), ours, "float32")


def test_node_with_short_context_proves_what_fits() -> None:
    assert disagreement(canary(), THEIRS[:20], "float32") == ""
    assert disagreement(canary(), [one + 1.0 for one in THEIRS[:20]], "float32") != ""


def test_model_with_uniform_tokens_agrees_with_itself() -> None:
    flat: list[float | None] = [-math.log(1000.0)] * (LENGTH - 1)
    assert disagreement(canary(logprobs=flat), [-math.log(1000.0) + 2e-7] * (LENGTH - 1), "bfloat16") == ""


@settings(deadline=None, derandomize=True)
@given(
    st.sampled_from(["float32", "bfloat16", "float16", "float8"]),
    st.sampled_from(["float32", "bfloat16", "float16", QUANTISED]),
    st.integers(1, 200),
)
def test_coarser_or_deeper_models_get_tolerance_others_fail(trainer: str, node: str, layers: int) -> None:
    allowed = tolerance(trainer, node, layers)
    assert 0 < allowed <= TOLERANCE_MAX
    assert tolerance(trainer, node, layers + 1) >= allowed
    assert tolerance(trainer, "bfloat16", layers) >= tolerance(trainer, "float32", layers)
    assert tolerance(trainer, QUANTISED, layers) >= allowed


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 300_000))
def test_canary_text_covers_the_vocabulary_and_is_constant(vocabulary: int) -> None:
    text = token_ids_for(vocabulary)
    assert text == token_ids_for(vocabulary)
    assert len(text) == LENGTH
    assert all(vocabulary // 16 <= token < max(vocabulary * 7 // 8, 1) for token in text)
    if vocabulary >= 84:
        assert len(set(text)) == LENGTH
        for part in range(4):  # in each quarter of the range
            quarter = (vocabulary * 7 // 8 - vocabulary // 16) / 4
            low = vocabulary // 16 + part * quarter
            assert sum(low <= token < low + quarter for token in text) >= LENGTH // 8
