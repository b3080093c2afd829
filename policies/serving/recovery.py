"""Continue a completion that was cut: which requests may continue, and the parameters for the next node.

A request continues from its prompt and the tokens that have arrived. The result equals the undisturbed completion
only if each further token depends on the sequence so far, its position and the seed alone. vLLM treats all tokens
of a continued request as its prompt, so a parameter that considers only generated tokens would restart in the
middle. A request with such a parameter starts over with its seed instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Functions of the whole sequence, or reduced at the cut. `repetition_penalty` considers all tokens
# together; `min_tokens` and `max_tokens` count generated tokens, so they are reduced.
SAFE = frozenset(
    {
        "allowed_token_ids",
        "cache_salt",
        "ignore_eos",
        "include_stop_str_in_output",  # of no effect without stop strings
        "length_penalty",  # of no effect without beams
        "logit_bias",
        "max_completion_tokens",
        "max_tokens",
        "min_p",
        "min_tokens",
        "priority",
        "repetition_penalty",
        "return_tokens_as_token_ids",
        "session_id",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop_token_ids",
        "stream_interval",
        "temperature",
        "top_k",
        "top_p",
        "user",
    }
)
# They count generated tokens; at 0 they do nothing.
_PENALTIES = frozenset({"frequency_penalty", "presence_penalty"})


def can_continue(body: Mapping[str, Any]) -> bool:
    """Whether a completion with these vLLM parameters may continue: all are known to give the same tokens.

    It needs a token limit, from which the remaining tokens follow.
    """
    known = all(name in SAFE or name in ("prompt", "seed") or _is_off(name, value) for name, value in body.items())
    return known and limit_of(body) is not None


def limit_of(body: Mapping[str, Any]) -> int | None:
    """Return the request's token limit; None without one."""
    limit = body.get("max_completion_tokens")
    if limit is None:
        limit = body.get("max_tokens")
    return limit if isinstance(limit, int) else None


def remaining_parameters(body: Mapping[str, Any], arrived: int) -> dict[str, Any]:
    """Return the sampling parameters for the tokens that remain after `arrived`, without the prompt.

    Args:
        body: the whole request's parameters, which satisfy `can_continue`.
        arrived: fewer than the request's limit.

    Raises ValueError if no tokens remain.
    """
    limit = limit_of(body)
    if limit is None or arrived >= limit:
        raise ValueError(f"no tokens remain of {limit} after {arrived}")
    remaining = {name: value for name, value in body.items() if name in SAFE}
    remaining.pop("max_completion_tokens", None)  # an alias of max_tokens
    remaining["max_tokens"] = limit - arrived
    if "min_tokens" in remaining:
        remaining["min_tokens"] = max(0, (remaining["min_tokens"] or 0) - arrived)
    return remaining


def _is_off(name: str, value: Any) -> bool:
    return value is None or value is False or value in ("", [], {}) or (name in _PENALTIES and value == 0)
