"""Completions from the trainer's own model, where a run has no rollout nodes (`rollout.replicas: 0`), or none can
be had for a while (`tasks.completions.drought`).

It stands in the place of the gateway, so that all around it stays: each completion has a seed of its own, is
stored before the step is applied, and is read back by a restarted trainer. In a run without rollout nodes nothing
is published: nobody pulls it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
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

from policies.model.vocabulary import PolicyVersion
from policies.serving.wire import CUT, REFUSED, Batch, Completion, CompletionRequest, PolicyRef
from tasks.completions.gateway_client import Generated
from tasks.trl.canary import as_evaluated


class OwnGeneration:
    """Completes batches with the model that is trained, by transformers' `generate`, all of a batch at once.

    Args:
        node: that this is.
        tick: called before each token; raises what ends the wait: Fenced, LeaveNow.
    """

    def __init__(self, node: str, tick: Callable[[], None]) -> None:
        self._node, self._tick = node, tick
        self._trainer: Any = None

    def attach(self, trainer: Any) -> None:
        """Name the trainer whose model it is."""
        self._trainer = trainer

    def publish(self, version: PolicyVersion, *_: Any) -> PolicyRef:
        """Name the policy, which is where it is needed."""
        return PolicyRef(str(version), "")

    def published(self, _: PolicyVersion) -> PolicyRef | None:
        """Nothing: what generates are the present weights."""
        return None

    def complete(self, batch: Batch, begun: Sequence[Completion] = ()) -> Generated:
        """Return every completion, in the order of the requests; those that were `begun` go on from their tokens.

        Raises Fenced, LeaveNow, torch.OutOfMemoryError.
        """
        most = self._longest_prompt(int(batch.sampling["max_tokens"]))
        refused = {
            one.index: end for one in batch.requests if (end := self._refusal(one, most, batch.policy.label))
        }
        fit = [one for one in batch.requests if one.index not in refused]
        before = {one.index: one for one in begun}
        made = {one.index: one for one in self._generated(batch, fit, before)} if fit else {}
        found = [made.get(one.index) or refused[one.index] for one in batch.requests]
        return Generated(found, discarded=0, wait_s=0.0)

    def _generated(
        self, batch: Batch, requests: list[CompletionRequest], begun: Mapping[int, Completion]
    ) -> Iterator[Completion]:
        trainer, length = self._trainer, int(batch.sampling["max_tokens"])
        model, ends = trainer.model, list(trainer.eos_token_ids)
        nothing = Completion(-1, [], [], CUT, batch.policy.label, "")
        there = self._with_room(requests, [begun.get(one.index, nothing) for one in requests], length)
        texts = [one.prompt_token_ids + so_far.token_ids for one, so_far in zip(requests, there, strict=True)]
        ids, mask = _padded(texts, ends[0], model.device)
        made = [len(one.token_ids) for one in there]
        draw = _SeededDraw([one.seed for one in requests], made, length, model.device, self._tick)
        config = GenerationConfig(
            max_new_tokens=length - min(made),
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=ends[0],
            use_cache=True,
        )
        # Of a model with adapters `generate` goes past the forward pass that accelerate has put under autocast.
        with torch.no_grad(), trainer.accelerator.autocast(), as_evaluated(model), _configured(model, config):
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=config,
                logits_processor=LogitsProcessorList([*_shaped(batch.sampling), draw]),
            )
        tokens, logprobs = out[:, ids.shape[1] :].tolist(), torch.stack(draw.logprobs, dim=1).tolist()
        for request, so_far, row, of_row in zip(requests, there, tokens, logprobs, strict=True):
            row = row[: length - len(so_far.token_ids)]
            end = next((place for place, token in enumerate(row) if token in ends), None)
            new = len(row) if end is None else end + 1
            why = "length" if end is None else "stop"
            token_ids, of_tokens = so_far.token_ids + row[:new], so_far.logprobs + of_row[:new]
            made_by = batch.policy.label, self._node
            yield Completion(request.index, token_ids, of_tokens, why, *made_by, handed_over=so_far.handed_over)

    def _with_room(
        self, requests: list[CompletionRequest], there: list[Completion], length: int
    ) -> list[Completion]:
        """What was begun, as far as the model has positions behind it for as many tokens as another one lacks: all
        are drawn on until the last one ends."""
        longest, to_come = self._longest_prompt(length), length - min(len(one.token_ids) for one in there)
        if longest is None:
            return there
        found = []
        for request, one in zip(requests, there, strict=True):
            room = longest + length - to_come - len(request.prompt_token_ids)
            found.append(replace(one, token_ids=one.token_ids[:room], logprobs=one.logprobs[:room]))
        return found

    def _longest_prompt(self, completion: int) -> int | None:
        """In tokens, so that a completion of that length fits behind it; None where the model has no bound."""
        positions = getattr(self._trainer.model.config.get_text_config(), "max_position_embeddings", None)
        return None if positions is None else int(positions) - completion

    def _refusal(self, request: CompletionRequest, longest: int | None, policy: str) -> Completion | None:
        """Return the end of a request that the model cannot complete, or None."""
        config, prompt, limit = self._trainer.model.config.get_text_config(), request.prompt_token_ids, None
        if not prompt:
            why = "the prompt has no token"
        elif max(prompt) >= config.vocab_size:
            why = f"token {max(prompt)} of the prompt is not in the model's vocabulary of {config.vocab_size}"
        elif longest is not None and len(prompt) > longest:
            limit = int(config.max_position_embeddings)
            why = f"prompt and completion are longer than the model's {limit} positions"
        else:
            return None
        return Completion(request.index, [], [], REFUSED, policy, self._node, why, limit)


class _SeededDraw(LogitsProcessor):  # type: ignore[misc]  # transformers has no types here
    """Draws each token by its completion's seed and its position, whatever else is in the batch.

    It leaves nothing but that token to choose, and keeps the log-probability that it had.

    Args:
        seeds: of each completion.
        made: how many tokens each has already.
        length: that a completion may have, in tokens.
        tick: called before each token.

    Attributes:
        logprobs: one tensor of shape (completions,) for each position so far, in natural logarithms.
    """

    def __init__(
        self, seeds: list[int], made: list[int], length: int, device: Any, tick: Callable[[], None]
    ) -> None:
        # In [0, 1), and so far below 1 that no rounding makes the product below the whole sum.
        rows = [torch.rand(length, dtype=torch.float64, generator=_generator(seed)) for seed in seeds]
        # Each from its next position on; what then comes from the front is drawn behind its last one, for nobody.
        rows = [row.roll(-count) for row, count in zip(rows, made, strict=True)]
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
    """What makes of logits the distribution that is drawn from, in transformers' order; `top_k` 0 is none, and
    with temperature 0 the likeliest token is."""
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
    """Prompts of one length, padded at their beginning, and which tokens are theirs; both (prompts, tokens)."""
    longest = max(map(len, prompts))
    ids = [[pad] * (longest - len(one)) + one for one in prompts]
    mask = [[0] * (longest - len(one)) + [1] * len(one) for one in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@contextlib.contextmanager
def _configured(model: Any, config: GenerationConfig) -> Iterator[None]:
    """While the model generates it has no settings of its own: `generate` would take from them what is not set."""
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own
