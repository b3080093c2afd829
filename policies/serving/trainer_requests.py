"""A trainer's requests: their seeds, and their division into batches within the gateway's limits."""

from __future__ import annotations

import hashlib
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


def request_seed(run_seed: int, timeline: int, step: int, call: int, prompt: int, sample: int) -> int:
    """Return a seed in [0, 2**63) for one completion.

    `call` counts the generate calls within a step (training, then evaluation, then tool turns), `prompt` is
    the index within the call and `sample` the index within the prompt's group. BLAKE2b spreads neighbouring
    inputs over the whole range. The timeline is an input, so a step repeated after a rollback gets new samples.
    """
    identity = f"{run_seed}/{timeline}/{step}/{call}/{prompt}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big") >> 1
