"""vLLM's server-sent events, typed: what a job keeps of them; nothing else is looked at.

The same events are read in two ways: as `Bare` for tokens and their log-probabilities alone, which training wants
and which costs least, and as `Full` for text as well. Numbers that no token can be are
refused here, so that nothing a node says is an error in this program later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

Token = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Error(msgspec.Struct, gc=False):
    """What vLLM says in place of tokens when it fails after its 200."""

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
    """The same, with text."""

    choices: list[FullChoice] = []
    error: Error | None = None


read_bare = msgspec.json.Decoder(Bare).decode
read_full = msgspec.json.Decoder(Full).decode
# What `read_*` raise for what is not an event; RecursionError is an attack on the stack.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


def logprobs_of(said: FullLogprobs | None) -> tuple[list[float | None], list[str], list[dict[str, float]]]:
    """Return the log-probability of each token, its text, and the log-probabilities of the likeliest others by
    their text."""
    if said is None:
        return [], [], []
    return said.token_logprobs, said.tokens, _numbers(said.top_logprobs or [])


def _numbers(top: Sequence[Mapping[str, float | None] | None]) -> list[dict[str, float]]:
    return [{token: value for token, value in (one or {}).items() if value is not None} for one in top]
