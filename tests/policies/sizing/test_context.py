"""Whether a prompt has room before a completion of full length."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_orch.policies.sizing.engine import context_problem

ROOM = "rollout.vllm.max-model-len"
LENGTH = "grpo.max_completion_length"
LONG = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}


def problem(flags: dict[str, Any], completion: int, env: dict[str, str] | None = None, **config: Any) -> str:
    """The key and the message in one line; empty where there is no problem."""
    found = context_problem(flags, env or {}, completion, config)
    return "" if found is None else f"{'.'.join(found[0])}: {found[1]}"


@pytest.mark.parametrize(
    ("flags", "completion", "expected"),
    [
        ({"max-model-len": 513}, 512, ""),
        ({"max-model-len": 512}, 512, f"{ROOM}: 512 leaves no room for a prompt: {LENGTH} is 512"),
        ({"max-model-len": "1K"}, 1024, f"{ROOM}: 1024 leaves no room for a prompt: {LENGTH} is 1024"),
        ({"max-model-len": 2048}, 512, ""),
        ({"max-model-len": 2049}, 512, f"{ROOM}: 2049 exceeds the model's context, and vLLM does not start"),
        ({"max-model-len": "auto"}, 2047, ""),
        ({"max-model-len": -1}, 2048, f"{LENGTH}: 2048 leaves no room for a prompt in the model's context"),
        ({}, 2047, ""),
        ({}, 2048, f"{LENGTH}: 2048 leaves no room for a prompt in the model's context"),
        ({"hf-overrides": {"max_position_embeddings": 9000}}, 2048, ""),
        ({"hf-config-path": "longer", "max-model-len": 9000}, 2048, ""),
    ],
)
def test_lengths_against_flag_and_model(flags: dict[str, Any], completion: int, expected: str) -> None:
    found = problem(flags, completion, max_position_embeddings=2048)
    assert found.startswith(expected) if expected else not found


def test_unknown_context_of_a_model_is_not_guessed() -> None:
    linear, llama = {"rope_type": "linear", "factor": 4.0}, {"rope_type": "llama3", "factor": 8.0}
    assert problem({}, 10**6) == ""
    assert problem({}, 4096, max_position_embeddings=2048, rope_parameters=linear) == ""
    assert problem({}, 4096, max_position_embeddings=2048, rope_scaling={"global": linear}) == ""
    assert problem({}, 4096, max_position_embeddings=2048, rope_scaling=llama)
    assert problem({}, 4096, text_config={"max_position_embeddings": 2048})


def test_context_above_the_models_is_the_users_decision() -> None:
    assert problem({"max-model-len": 4096}, 512, LONG, max_position_embeddings=2048) == ""


def test_context_that_the_model_supports_is_used() -> None:
    assert problem({"max-model-len": 4096}, 512, max_position_embeddings=2048, model_max_length=4096) == ""
    assert problem({"max-model-len": 4097}, 512, max_position_embeddings=2048, model_max_length=4096)
