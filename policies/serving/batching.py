"""Split requests into batches within the gateway's limits on number and size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from grpo_orch.policies.serving.wire import CompletionRequest

REQUESTS_MAX = 32_768
TOKENS_MAX = 40 << 20  # of prompts, up to 8 bytes each in JSON; consecutive requests of one prompt count it once


def split_batches(
    requests: Sequence[CompletionRequest], requests_max: int = REQUESTS_MAX, tokens_max: int = TOKENS_MAX
) -> Iterator[list[CompletionRequest]]:
    """Yield batches in order, as few as possible. A prompt longer than `tokens_max` gets a batch of its own."""
    piece: list[CompletionRequest] = []
    tokens = 0
    for request in requests:
        is_repeated = bool(piece) and piece[-1].prompt_token_ids == request.prompt_token_ids
        added = 0 if is_repeated else len(request.prompt_token_ids)
        if piece and (len(piece) == requests_max or (added > 0 and tokens + added > tokens_max)):
            yield piece
            piece, tokens, added = [], 0, len(request.prompt_token_ids)
        piece.append(request)
        tokens += added
    if piece:
        yield piece
