"""Completions from the trainer's own model: with `rollout.replicas: 0`, or while no rollout node is available
(`tasks.completions.node_shortage`).

It replaces the gateway and nothing else: each completion has a seed of its own, is stored before the step is
applied, and is read back by a restarted trainer. A run without rollout nodes publishes no policies.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import CUT, REFUSED, Batch, Completion, CompletionRequest, PolicyRef
from grpo_orch.tasks.completions.gateway_client import Generated
from grpo_orch.tasks.completions.node_shortage import NodeShortage, Share
from grpo_orch.tasks.machine.leaving import LeaveNow
from grpo_orch.tasks.storing.heartbeat import Fenced
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

    def complete(self, batch: Batch, begun: Sequence[Completion] = ()) -> Generated:
        """Return every completion, in the order of the requests; those in `begun` continue from their tokens.

        Raises Fenced, LeaveNow, torch.OutOfMemoryError.
        """
        most = self._longest_prompt(int(batch.sampling["max_tokens"]))
        refused = {
            request.index: refusal
            for request in batch.requests
            if (refusal := self._refusal(request, most, batch.policy.label))
        }
        accepted = [request for request in batch.requests if request.index not in refused]
        earlier = {completion.index: completion for completion in begun}
        made = {new.index: new for new in self._generated(batch, accepted, earlier)} if accepted else {}
        completions = [made.get(request.index) or refused[request.index] for request in batch.requests]
        return Generated(completions, discarded=0, wait_s=0.0)

    def _generated(
        self, batch: Batch, requests: list[CompletionRequest], begun: Mapping[int, Completion]
    ) -> Iterator[Completion]:
        trainer, length = self._trainer, int(batch.sampling["max_tokens"])
        model, ends = trainer.model, list(trainer.eos_token_ids)
        nothing = Completion(-1, [], [], CUT, batch.policy.label, "")
        earlier = self._fitting(requests, [begun.get(request.index, nothing) for request in requests], length)
        texts = [request.prompt_token_ids + old.token_ids for request, old in zip(requests, earlier, strict=True)]
        ids, mask = _padded(texts, ends[0], model.device)
        made = [len(old.token_ids) for old in earlier]
        draw = _SeededDraw([request.seed for request in requests], made, length, model.device, self._tick)
        config = GenerationConfig(
            max_new_tokens=length - min(made),
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
        for request, old, row, row_logprobs in zip(requests, earlier, tokens, logprobs, strict=True):
            row = row[: length - len(old.token_ids)]
            end = next((place for place, token in enumerate(row) if token in ends), None)
            new = len(row) if end is None else end + 1
            yield Completion(
                request.index,
                old.token_ids + row[:new],
                old.logprobs + row_logprobs[:new],
                "length" if end is None else "stop",
                batch.policy.label,
                self._node,
                handed_over=old.handed_over,
            )

    def _fitting(
        self, requests: list[CompletionRequest], earlier: list[Completion], length: int
    ) -> list[Completion]:
        """Cut earlier tokens so that the model has positions for the rest.

        `generate` extends all rows until the last one ends, so each row needs as many positions as the row that
        lacks most tokens.
        """
        longest = self._longest_prompt(length)
        if longest is None:
            return earlier
        missing = length - min(len(completion.token_ids) for completion in earlier)
        fitting = []
        for request, old in zip(requests, earlier, strict=True):
            most = longest + length - missing - len(request.prompt_token_ids)
            fitting.append(replace(old, token_ids=old.token_ids[:most], logprobs=old.logprobs[:most]))
        return fitting

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
        made: tokens that each completion has already.
        length: most tokens of a completion.
        tick: called before each token.

    Attributes:
        logprobs: of the drawn tokens, natural logarithms: one tensor of shape (completions,) for each position.
    """

    def __init__(
        self, seeds: list[int], made: list[int], length: int, device: Any, tick: Callable[[], None]
    ) -> None:
        # In [0, 1), and far enough below 1 that no rounding makes `point` reach the whole sum.
        rows = [torch.rand(length, dtype=torch.float64, generator=_generator(seed)) for seed in seeds]
        # Each row from its next position on. The values that wrap around are drawn after its last token, unused.
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


class OwnShare:
    """One process's part of it. Each process has the whole model.

    Args:
        drought: of the first process; None in the others.
        own: generates with this process's model.
    """

    def __init__(self, drought: NodeShortage | None, own: OwnGeneration) -> None:
        self._drought, self._own = drought, own

    def make(self, accelerator: Any, *, training: bool) -> None:
        """Generate this process's part of the first process's share, and gather the parts there. Raises Fenced."""
        began_s = time.monotonic()
        share = None if self._drought is None else self._drought.share(accelerator.num_processes)
        [share] = broadcast_object_list([share])
        assert share is not None
        completions, failure = self._part(share.of_process(accelerator.process_index, accelerator.num_processes))
        parts: list[tuple[list[Completion], str | None]] = gather_object([(completions, failure)])
        if self._drought is None:
            return
        gathered = [completion for part, _ in parts for completion in part]
        self._drought.take(gathered, time.monotonic() - began_s, training=training)
        failures = [failure for _, failure in parts if failure is not None]
        if errors := [failure for failure in failures if failure]:
            self._drought.record_failure(errors[0])
        elif failures:
            self._drought.halve_share()

    def _part(self, share: Share) -> tuple[list[Completion], str | None]:
        """Return the completions and None, or no completions and the error: empty if memory ran out."""
        try:
            return self._own.complete(share.batch, share.begun).completions, None
        except LeaveNow:  # raised again in the first process before its next request
            return [], None
        except torch.OutOfMemoryError:
            return [], ""
        except Fenced:
            raise
        except Exception as error:  # noqa: BLE001  # the model's own code may raise anything
            return [], f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # training needs other block sizes
