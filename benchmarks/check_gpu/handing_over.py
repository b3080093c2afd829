"""How often a completion in bfloat16 goes on otherwise where another engine takes it up from its tokens so far.

An engine computes other last bits in a batch of another shape (docs/decisions/022), and a token may follow from
those. So it is counted, and fails only where as much differs as if the tokens so far had not been taken up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.check_gpu.lab import Lab
from benchmarks.check_gpu.outcome import Failed
from grpo_orch.policies.serving.sampling_check import judge

COUNT, TOKENS, CUT = 32, 48, 24
Rows = Sequence[Sequence[int]]


def prompts() -> list[list[int]]:
    """So many of one length, all different."""
    return [[1, 5 + one, 6, 7 + one % 5] for one in range(COUNT)]


def judged(whole: Rows, rest: Rows) -> str:
    """What of the whole completions' rests came out otherwise after the hand-over. Raises Failed."""
    kept = [list(one[CUT:]) for one in whole]
    trial = judge([one[0] for one in kept], [one[0] for one in rest])
    if not trial.passed:
        raise Failed(f"only {trial.agree:.0%} went on with the same token; chance gives {trial.chance:.0%}")
    others = [
        next(place for place, (a, b) in enumerate(zip(one, other, strict=True), CUT) if a != b)
        for one, other in zip(kept, rest, strict=True)
        if one != list(other)
    ]
    since = f", the earliest from token {min(others)}" if others else ""
    return f"of {len(whole)} completions, cut at token {CUT} of {TOKENS}, {len(others)} differ{since}"


def by_transformers(lab: Lab) -> str:
    """A batch on one model, and each completion's second half alone on another, greedy."""
    other_device = torch.device("cuda", 1) if lab.gpus > 1 else lab.device
    first, second = lab.model().bfloat16(), lab.model().bfloat16().to(other_device)
    whole = _greedy(first, prompts(), TOKENS)
    begun = [prompt + one[:CUT] for prompt, one in zip(prompts(), whole, strict=True)]
    rest = [_greedy(second, [one], TOKENS - CUT)[0] for one in begun]
    where = "on another GPU" if lab.gpus > 1 else "on the same device"
    return f"{judged(whole, rest)}; {where}, greedy"


def _greedy(model: Any, rows: list[list[int]], count: int) -> list[list[int]]:
    ids = torch.tensor(rows, device=model.device)
    mask = torch.ones_like(ids)
    made = model.generate(
        ids, attention_mask=mask, do_sample=False, min_new_tokens=count, max_new_tokens=count, pad_token_id=0
    )
    tokens: list[list[int]] = made[:, ids.shape[1] :].tolist()
    return tokens
