"""Typed decoders of vLLM's server-sent events, limited to the fields that a job keeps.

`Bare` has tokens and their log-probabilities only, as training needs them, and costs least; `Full` has text as
well. Numbers that cannot be token ids are rejected here, so that no node's data causes an error later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

Token = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Error(msgspec.Struct, gc=False):
    """vLLM's error event, for a failure after it has answered 200."""

    message: str = ""
    code: int = 500


class BareLogprobs(msgspec.Struct, gc=False):
    token_logprobs: list[float | None] = []


class BareChoice(msgspec.Struct, gc=False):
    token_ids: list[Token] | None = None
    logprobs: BareLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Bare(msgspec.Struct, gc=False):
    """One event of `/v1/completions`."""

    choices: list[BareChoice] = []
    error: Error | None = None


class FullLogprobs(msgspec.Struct, gc=False):
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float | None] | None] | None = None


class FullChoice(msgspec.Struct, gc=False):
    text: str = ""
    token_ids: list[Token] | None = None
    logprobs: FullLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[Token] | None = None


class Full(msgspec.Struct, gc=False):
    """One event of `/v1/completions`, with text."""

    choices: list[FullChoice] = []
    error: Error | None = None


read_bare = msgspec.json.Decoder(Bare).decode
read_full = msgspec.json.Decoder(Full).decode
# Raised by `read_*` for invalid events; RecursionError for JSON nested too deeply.
DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)


def logprobs_of(logprobs: FullLogprobs | None) -> tuple[list[float | None], list[str], list[dict[str, float]]]:
    """Return each token's log-probability, its text, and the log-probabilities of its likeliest alternatives."""
    if logprobs is None:
        return [], [], []
    return logprobs.token_logprobs, logprobs.tokens, _without_nulls(logprobs.top_logprobs or [])


def _without_nulls(top: Sequence[Mapping[str, float | None] | None]) -> list[dict[str, float]]:
    return [
        {token: value for token, value in (alternatives or {}).items() if value is not None}
        for alternatives in top
    ]
