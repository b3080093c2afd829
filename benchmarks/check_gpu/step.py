"""A trainer's step with torch and transformers alone, and what it takes in memory against arithmetic."""

from __future__ import annotations

import io

import torch

from benchmarks.check_gpu.lab import Lab
from benchmarks.check_gpu.outcome import Failed

GROUP, TOKENS = 16, 24
# Hidden size, layers and vocabulary: large enough on a GPU that the allocator's rounding is nothing beside it.
SIZES = {"cpu": (128, 2, 512), "cuda": (1024, 8, 16384)}
TOLERANCE = 0.02
WEIGHT, GRADIENT, ADAMW = 4, 4, 8  # bytes a parameter, in float32
MIB = 2**20


def grpo_step(lab: Lab) -> str:
    """Generate a group, score it, and move the policy by its advantages, under autocast as on real GPUs."""
    model = lab.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prompt = torch.tensor([[1, 5, 6, 7]] * GROUP, device=lab.device)
    made = model.generate(prompt, do_sample=True, min_new_tokens=TOKENS, max_new_tokens=TOKENS, pad_token_id=0)
    completions = made[:, prompt.shape[1] :]
    rewards = (completions < 40).float().mean(dim=1)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    with torch.autocast(lab.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=made, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    logprobs = logits.float().log_softmax(dim=-1).gather(2, completions[:, :, None])[:, :, 0]
    loss = -(advantages[:, None] * logprobs).mean()
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    after = dict(model.named_parameters())
    if not all(torch.isfinite(one).all() for one in after.values()) or not 0 < norm < float("inf"):
        raise Failed(f"loss {float(loss):.3g}, gradient norm {norm:.3g}: weights are not numbers any more")
    same = [name for name, one in after.items() if torch.equal(one, before[name])]
    if same:
        raise Failed(f"{same[0]} did not change, nor did {len(same) - 1} more")
    return f"{GROUP} completions of {TOKENS} tokens; gradient norm {norm:.2f}; every tensor changed"


def memory(lab: Lab) -> str:
    """What weights, gradients and AdamW's two values take on the device, and the optimizer's state in a file."""
    lab.free()
    begun = torch.cuda.memory_allocated() if lab.gpus else 0
    hidden, layers, vocabulary = SIZES[lab.device.type]
    model = lab.model(hidden=hidden, layers=layers, vocabulary=vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    ids = torch.randint(3, vocabulary, (1, 64), device=lab.device)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    count = sum(one.numel() for one in model.parameters())
    expected = count * (WEIGHT + GRADIENT + ADAMW)
    if lab.gpus:
        held, how = torch.cuda.memory_allocated() - begun, "the allocator says"
    else:
        states = [one for state in optimizer.state.values() for one in state.values()]
        parameters = list(model.parameters())
        held = sum(one.nbytes for one in [*states, *parameters, *(one.grad for one in parameters)])
        how = "its tensors are"
    written = io.BytesIO()
    torch.save(optimizer.state_dict(), written)
    for what, bytes_, by in (("memory", held, expected), ("the optimizer's state", written.tell(), count * ADAMW)):
        if abs(bytes_ / by - 1) > TOLERANCE:
            raise Failed(f"{what} takes {bytes_ / MIB:.1f} MiB, by arithmetic {by / MIB:.1f}")
    peak = f", {torch.cuda.max_memory_allocated() / MIB:.0f} at most" if lab.gpus else ""
    return f"{expected / MIB:.1f} MiB by arithmetic, {how} {held / MIB:.1f}{peak}"
