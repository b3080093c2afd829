"""How many requests are asked for at once: no more than the gateway takes."""

from __future__ import annotations

import pytest

from grpo_orch.orchestrator.gateway.surface import admission
from grpo_orch.policies.serving import trainer_requests
from grpo_orch.policies.serving.trainer_requests import split_batches
from grpo_orch.policies.serving.wire import Batch, CompletionRequest, PolicyRef
from grpo_orch.tasks.completions.gateway_client import body_of

MIB = 1 << 20
TOKEN = 999_999  # no vocabulary has longer numbers


def asked(prompts: list[list[int]], samples: int = 1) -> list[CompletionRequest]:
    return [
        CompletionRequest(n * samples + sample, prompt, 2**62)
        for n, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


@pytest.mark.parametrize(
    ("requests", "counts"),
    [
        (asked([]), []),
        (asked([[1]] * 3), [3]),
        (asked([[1], [2]] * 4), [5, 3]),
        (asked([[1, 1], [2, 2], [3, 3]]), [2, 1]),  # by tokens
        (asked([[1, 1], [2, 2], [3, 3]], samples=2), [4, 2]),
        (asked([[1] * 9, [2], [3]]), [1, 2]),
        (asked([[7] * 9], samples=7), [5, 2]),
    ],
)
def test_requests_are_divided_in_order(requests: list[CompletionRequest], counts: list[int]) -> None:
    found = list(split_batches(requests, requests_max=5, tokens_max=5))
    assert [len(piece) for piece in found] == counts
    assert [one for piece in found for one in piece] == requests


def test_no_piece_is_more_than_the_gateway_takes() -> None:
    """100,000 short prompts are too many for one batch, and 20 of two million tokens too large."""
    short = list(split_batches(asked([[number % 1000, TOKEN] for number in range(100_000)])))
    assert max(map(len, short)) <= admission.REQUESTS_MAX
    assert sum(map(len, short)) == 100_000
    assert len(body_of(Batch(PolicyRef("0-0", ""), {}, short[0], 1.0))) < admission.BATCH_SIZE_MAX
    each = len(str([TOKEN]).strip("[]")) + len(",")
    wordy = 200 * trainer_requests.REQUESTS_MAX  # what a request is beside its prompt, at most
    assert trainer_requests.TOKENS_MAX * each + wordy < admission.BATCH_SIZE_MAX
