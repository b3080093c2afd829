"""How a completion that was cut goes on: which requests may, and what is asked of the next node.

A request goes on from its prompt and the tokens that have arrived. That gives the undisturbed completion only
where each further token is a function of the sequence so far, of its position in it, and of the seed. vLLM takes
all tokens
of a continued request for its prompt: a parameter that looks at the generated ones alone would begin anew
in the middle, and a request with such a parameter starts over with its seed instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Functions of the sequence, or counted down at the cut. `repetition_penalty` sees the prompt and what was
# generated as one; `min_tokens` and `max_tokens` count what was generated, and so are reduced.
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
# They make the prompt, whose token ids are known once a node has answered, or belong to the whole request.
_PROMPT = frozenset(
    {
        "add_special_tokens",
        "logprobs",
        "model",
        "n",
        "prompt",
        "return_token_ids",
        "seed",
        "stream",
        "stream_options",
    }
)
# They look at the generated tokens alone. After a cut they begin anew: nearly the same.
NEARLY = frozenset({"bad_words", "frequency_penalty", "presence_penalty", "stop"})
# They count what was generated; at 0 they do nothing.
_PENALTIES = frozenset({"frequency_penalty", "presence_penalty"})


def continues(body: Mapping[str, Any]) -> bool:
    """Whether a completion with these parameters of vLLM may go on from the middle: all are known to give the same
    tokens then. One without a limit to its tokens may not: what is left of it is unknown."""
    known = all(name in SAFE or name in _PROMPT or _is_off(name, value) for name, value in body.items())
    return known and limit_of(body) is not None


def nearly_continues(body: Mapping[str, Any]) -> bool:
    """Whether a completion with these parameters may go on from the middle where it cannot be made again, because
    other nodes compute other last bits: a node could have made it so, but for what `NEARLY` forgets."""
    return all(name in SAFE or name in NEARLY or name in _PROMPT or _is_off(name, body[name]) for name in body)


def limit_of(body: Mapping[str, Any]) -> int | None:
    """How many tokens the request may get, or None when it does not say."""
    limit = body.get("max_completion_tokens")
    if limit is None:
        limit = body.get("max_tokens")
    return limit if isinstance(limit, int) else None


def rest(body: Mapping[str, Any], arrived: int) -> dict[str, Any]:
    """Return the parameters for what is missing after `arrived` tokens: those of sampling, without the prompt.

    Args:
        body: the whole request's, which `continues` or `nearly_continues`.
        arrived: fewer than the request's limit.

    Raises ValueError where nothing is missing.
    """
    limit = limit_of(body)
    if limit is None or arrived >= limit:
        raise ValueError(f"nothing is left of {limit} tokens after {arrived}")
    left = {
        name: value
        for name, value in body.items()
        if name in SAFE or (name in NEARLY and not _is_off(name, value))
    }
    left.pop("max_completion_tokens", None)  # its other name
    left["max_tokens"] = limit - arrived
    if "min_tokens" in left:
        left["min_tokens"] = max(0, (left["min_tokens"] or 0) - arrived)
    return left


def _is_off(name: str, value: Any) -> bool:
    return value is None or value is False or value in ("", [], {}) or (name in _PENALTIES and value == 0)
