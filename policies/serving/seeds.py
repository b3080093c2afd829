"""The seed of each completion. It depends on the completion's identity, not on where or when it is made."""

from __future__ import annotations

import hashlib


def request_seed(run_seed: int, timeline: int, step: int, call: int, prompt: int, sample: int) -> int:
    """Return a seed in [0, 2**63) for one completion.

    `call` counts the generate calls within a step (training, then evaluation, then tool turns), `prompt` is
    the index within the call and `sample` the index within the prompt's group. BLAKE2b spreads neighbouring
    inputs over the whole range. The timeline is an input, so a step repeated after a rollback gets new samples.
    """
    identity = f"{run_seed}/{timeline}/{step}/{call}/{prompt}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big") >> 1
