"""Which requests may go on from the middle, and with what."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_orch.policies.serving.recovery import can_continue, remaining_parameters

BODY = {"prompt": [1], "seed": 3, "temperature": 0.7, "max_tokens": 10}


@pytest.mark.parametrize(
    ("more", "may"),
    [
        ({}, True),
        ({"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "logit_bias": {"3": 1}}, True),
        ({"min_tokens": 3, "stop_token_ids": [4], "ignore_eos": True, "allowed_token_ids": [1, 2]}, True),
        ({"max_completion_tokens": 5}, True),
        (
            {"stop": [], "bad_words": None, "structured_outputs": None, "echo": False, "use_beam_search": False},
            True,
        ),
        ({"presence_penalty": 0, "frequency_penalty": 0.0}, True),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -1}, False),
        ({"stop": ["x"]}, False),
        ({"stop": "x"}, False),
        ({"bad_words": ["x"]}, False),
        ({"structured_outputs": {"regex": "x"}}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"repetition_detection": {"min_count": 2}}, False),
        ({"thinking_token_budget": 0}, False),
        ({"use_beam_search": True}, False),
        ({"prompt_logprobs": 0}, False),
        ({"echo": True}, False),
        ({"a_key_of_tomorrow": 1}, False),
        ({"max_tokens": None}, False),
    ],
    ids=str,
)
def test_only_proven_reproducible_requests_continue(more: dict[str, Any], may: bool) -> None:
    assert can_continue({**BODY, **more}) is may


def test_the_rest_is_the_sampling_counted_on() -> None:
    body = {**BODY, "min_tokens": 4, "top_p": 0.5, "stop": []}
    assert remaining_parameters(body, 3) == {"temperature": 0.7, "max_tokens": 7, "min_tokens": 1, "top_p": 0.5}
    assert remaining_parameters(body, 9) == {"temperature": 0.7, "max_tokens": 1, "min_tokens": 0, "top_p": 0.5}
    assert remaining_parameters({"max_completion_tokens": 8, "max_tokens": 99}, 3) == {"max_tokens": 5}
    assert body["max_tokens"] == 10


@pytest.mark.parametrize("arrived", [10, 11])
def test_nothing_is_left_of_a_request_that_has_all(arrived: int) -> None:
    with pytest.raises(ValueError, match="no tokens remain"):
        remaining_parameters(BODY, arrived)
