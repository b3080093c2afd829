"""Requests, divided so that each part is a batch which a gateway takes: it has limits on their number and size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from policies.serving.wire import CompletionRequest

REQUESTS_MAX = 32_768
TOKENS_MAX = 40 << 20  # of prompts, up to 8 bytes each in JSON; those in a row of the same prompt count once


def in_pieces(
    requests: Sequence[CompletionRequest], requests_max: int = REQUESTS_MAX, tokens_max: int = TOKENS_MAX
) -> Iterator[list[CompletionRequest]]:
    """Yield them in order, as few parts as it goes; a prompt longer than `tokens_max` is in one of its own."""
    piece: list[CompletionRequest] = []
    tokens = 0
    for one in requests:
        again = bool(piece) and piece[-1].prompt_token_ids == one.prompt_token_ids
        more = 0 if again else len(one.prompt_token_ids)
        if piece and (len(piece) == requests_max or (more > 0 and tokens + more > tokens_max)):
            yield piece
            piece, tokens, more = [], 0, len(one.prompt_token_ids)
        piece.append(one)
        tokens += more
    if piece:
        yield piece
