"""Completions from the trainer's own model, with `rollout.replicas: 0`.

It replaces the gateway and nothing else: each completion has a seed of its own, is stored before the step is
applied, and is read back by a restarted trainer. A run without rollout nodes publishes no policies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import REFUSED, Batch, Completion, CompletionRequest, PolicyRef
from grpo_orch.tasks.completions.gateway_client import Generated
from grpo_orch.tasks.trl.canary import as_evaluated


class OwnGeneration:
    """Completes batches with the trained model and transformers' `generate`, a whole batch at a time.

    Args:
        node: this node's name.
        tick: called before each token; raises Fenced or LeaveNow to interrupt.
    """

    def __init__(self, node: str, tick: Callable[[], None]) -> None:
        self._node, self._tick = node, tick
        self._trainer: Any = None

    def attach(self, trainer: Any) -> None:
        """Set the trainer whose model generates."""
        self._trainer = trainer

    def publish(self, version: PolicyVersion, *_: Any) -> PolicyRef:
        """Return the policy's name. The weights are here already."""
        return PolicyRef(str(version), "")

    def published(self, _: PolicyVersion) -> PolicyRef | None:
        """Return None: only the present weights can generate."""
        return None

    def complete(self, batch: Batch) -> Generated:
        """Return every completion, in the order of the requests.

        Raises Fenced, LeaveNow, torch.OutOfMemoryError.
        """
        most = self._longest_prompt(int(batch.sampling["max_tokens"]))
        refused = {
            request.index: refusal
            for request in batch.requests
            if (refusal := self._refusal(request, most, batch.policy.label))
        }
        accepted = [request for request in batch.requests if request.index not in refused]
        made = {new.index: new for new in self._generated(batch, accepted)} if accepted else {}
        completions = [made.get(request.index) or refused[request.index] for request in batch.requests]
        return Generated(completions, discarded=0, wait_s=0.0)

    def _generated(self, batch: Batch, requests: list[CompletionRequest]) -> Iterator[Completion]:
        trainer, length = self._trainer, int(batch.sampling["max_tokens"])
        model, ends = trainer.model, list(trainer.eos_token_ids)
        ids, mask = _padded([request.prompt_token_ids for request in requests], ends[0], model.device)
        draw = _SeededDraw([request.seed for request in requests], length, model.device, self._tick)
        config = GenerationConfig(
            max_new_tokens=length,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=ends[0],
            use_cache=True,
        )
        # With adapters, `generate` bypasses the forward pass that accelerate has wrapped in autocast.
        with torch.no_grad(), trainer.accelerator.autocast(), as_evaluated(model), _configured(model, config):
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=config,
                logits_processor=LogitsProcessorList([*_shaped(batch.sampling), draw]),
            )
        tokens, logprobs = out[:, ids.shape[1] :].tolist(), torch.stack(draw.logprobs, dim=1).tolist()
        for request, row, row_logprobs in zip(requests, tokens, logprobs, strict=True):
            end = next((place for place, token in enumerate(row) if token in ends), None)
            new = len(row) if end is None else end + 1
            yield Completion(
                request.index,
                row[:new],
                row_logprobs[:new],
                "length" if end is None else "stop",
                batch.policy.label,
                self._node,
            )

    def _longest_prompt(self, completion: int) -> int | None:
        """Return the most tokens of a prompt that leave space for a completion; None if the model has no limit."""
        positions = getattr(self._trainer.model.config.get_text_config(), "max_position_embeddings", None)
        return None if positions is None else int(positions) - completion

    def _refusal(self, request: CompletionRequest, longest: int | None, policy: str) -> Completion | None:
        """Return the refusal of a request that the model cannot complete, or None."""
        config, prompt, limit = self._trainer.model.config.get_text_config(), request.prompt_token_ids, None
        if not prompt:
            why = "the prompt is empty"
        elif max(prompt) >= config.vocab_size:
            why = f"token {max(prompt)} of the prompt is not in the model's vocabulary of {config.vocab_size}"
        elif longest is not None and len(prompt) > longest:
            limit = int(config.max_position_embeddings)
            why = f"prompt and completion are longer than the model's {limit} positions"
        else:
            return None
        return Completion(request.index, [], [], REFUSED, policy, self._node, why, limit)


class _SeededDraw(LogitsProcessor):  # type: ignore[misc]  # transformers has no types here
    """Draws each token by its completion's seed and position, independent of the rest of the batch.

    The scores that it returns leave only that token to choose.

    Args:
        seeds: of each completion.
        length: most tokens of a completion.
        tick: called before each token.

    Attributes:
        logprobs: of the drawn tokens, natural logarithms: one tensor of shape (completions,) for each position.
    """

    def __init__(self, seeds: list[int], length: int, device: Any, tick: Callable[[], None]) -> None:
        # In [0, 1), and far enough below 1 that no rounding makes `point` reach the whole sum.
        rows = [torch.rand(length, dtype=torch.float64, generator=_generator(seed)) for seed in seeds]
        self._points = (torch.stack(rows) * (1 - 2**-50)).to(device)
        self._tick = tick
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, _input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        self._tick()
        logprobs = scores.float().log_softmax(dim=-1)
        sums = logprobs.double().exp().cumsum(dim=-1)
        point = self._points[:, len(self.logprobs), None] * sums[:, -1:]
        drawn = torch.searchsorted(sums, point, right=True)
        self.logprobs.append(logprobs.gather(1, drawn)[:, 0])
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _shaped(sampling: dict[str, Any]) -> Iterator[LogitsProcessor]:
    """Yield the processors that shape logits, in transformers' order.

    `top_k` 0 means no limit, and temperature 0 the likeliest token.
    """
    if (penalty := sampling["repetition_penalty"]) != 1.0:
        yield RepetitionPenaltyLogitsProcessor(penalty)
    if sampling["temperature"] == 0.0:
        yield TopKLogitsWarper(1)
        return
    if (temperature := sampling["temperature"]) != 1.0:
        yield TemperatureLogitsWarper(float(temperature))
    if (top_k := sampling["top_k"]) > 0:
        yield TopKLogitsWarper(top_k)
    if (top_p := sampling["top_p"]) < 1.0:
        yield TopPLogitsWarper(top_p)
    if (min_p := sampling["min_p"]) > 0.0:
        yield MinPLogitsWarper(min_p)


def _padded(prompts: list[list[int]], pad: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts padded on the left, and the mask of their tokens; both of shape (prompts, tokens)."""
    longest = max(map(len, prompts))
    ids = [[pad] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@contextlib.contextmanager
def _configured(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Replace the model's generation config, from which `generate` would take unset values."""
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own
