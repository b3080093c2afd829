"""Sampling as a function of a request's seed and of the token's position, inside vLLM's workers.

vLLM's older model runner draws from one random stream a request, which begins anew when the request goes on at
another server after the tokens that it has. Its newer one (where Triton is, so on GPUs) draws by seed and
position, and so does the older one with this extension, `--worker-extension-cls`: before each draw a request's
generator is seeded with the number of SplitMix64 that stands at the token's position. Neither the server, nor the
batch, nor a preemption inside vLLM plays a part then.

Nothing of vLLM is imported, and nothing of it is replaced but the generators that it made. Whether it came out as
meant is tried on each boot, see `tasks.rollout.vllm.server.Server.sample_by_position`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class PositionSampling:
    """What each worker of vLLM can do in addition, through `collective_rpc`."""

    def sample_by_position(self: Any) -> str:
        """From now on draw by seed and position. Returns why that cannot be; empty where it can."""
        if self.vllm_config.speculative_config is not None:
            return "with speculative decoding a draw depends on what was guessed before it"
        if self.use_v2_model_runner:
            return ""  # it does so by itself
        runner = self.model_runner
        try:
            _ = runner.requests, runner.input_batch.req_ids, runner.optimistic_seq_lens_cpu
            generators, sampler = runner.input_batch.generators, runner.sampler
        except AttributeError as error:
            return f"this vLLM's model runner is another than the one that is known: {error}"
        if not isinstance(generators, dict) or not isinstance(sampler, torch.nn.Module):
            return "this vLLM's model runner holds its generators in a way that is not known"
        sampler.register_forward_pre_hook(_Seeding(runner), with_kwargs=True)
        return ""


class Generator(torch.Generator):  # type: ignore[misc]
    """Seeded before each draw, so that a draw in vain need not be taken back.

    vLLM takes back what it drew for a prompt that was computed in part only, by an offset that generators of the
    CPU do not have: there it would end the engine.
    """

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Nothing: the next draw does not depend on it."""


class _Seeding:
    """Seeds a runner's generators for the tokens that its sampler is about to draw."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __call__(self, _sampler: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        runner, batch = self._runner, self._runner.input_batch
        if not batch.generators or kwargs["sampling_metadata"].generators is not batch.generators:
            return  # nothing is seeded, or a run on made-up requests
        lengths = runner.optimistic_seq_lens_cpu.tolist()
        requests = [runner.requests[batch.req_ids[row]] for row in batch.generators]
        seeds = [request.sampling_params.seed for request in requests]
        numbers = numbers_at(seeds, [lengths[row] for row in batch.generators]).tolist()
        for (row, generator), request, number in zip(
            list(batch.generators.items()), requests, numbers, strict=True
        ):
            if not isinstance(generator, Generator):
                generator = batch.generators[row] = request.generator = Generator(generator.device)
            generator.manual_seed(number)


def numbers_at(seeds: list[int], positions: list[int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The numbers at `positions`, from 0, of the SplitMix64 sequences with these seeds (signed 64 bits)."""
    steps = np.array(positions, np.uint64) + np.uint64(1)
    number: np.ndarray[Any, np.dtype[np.uint64]] = np.array(seeds, np.int64).view(np.uint64) + steps * _GOLDEN
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))
