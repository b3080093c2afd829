"""What each worker of vLLM can do in addition, `--worker-extension-cls`, through `collective_rpc`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from checkpoint.weights import delta
from tasks.rollout.vllm.places import NotFollowed, Places, bits, places_of

# Sampling as a function of a request's seed and of the token's position, inside vLLM's workers.
#
# vLLM's older model runner draws from one random stream a request, which begins anew when the request goes on at
# another server after the tokens that it has. Its newer one (where Triton is, so on GPUs) draws by seed and
# position, and so does the older one with this extension, `--worker-extension-cls`: before each draw a request's
# generator is seeded with the number of SplitMix64 that stands at the token's position. Neither the server, nor
# the batch, nor a preemption inside vLLM plays a part then.
#
# Nothing of vLLM is imported, and nothing of it is replaced but the generators that it made. Whether it came out
# as meant is tried on each boot, see `tasks.rollout.vllm.server.Server.sample_by_position`.

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


# Changes of weights inside vLLM's workers, through `collective_rpc`: put into the parameters, or compared.

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SIGNED = {1: "u1", 2: "<i2", 4: "<i4", 8: "<i8"}  # torch takes no others of numpy's words
AT_A_TIME = 2**22  # elements: what is computed about their places takes 0.3 GB beside the model


class Patching:
    """What each worker of vLLM can do in addition, through `collective_rpc`."""

    def follow_loader(self: Any, deltas: Sequence[str]) -> str:
        """Find out where the tensors that these deltas change are in the parameters. Returns why that cannot be
        said; empty where it can. Changes nothing. Raises Corrupt, OSError."""
        tensors = [one for path in deltas for one in delta.index_of(Path(path)).tensors]
        for one in tensors:
            if one.dtype not in TYPES:
                return f"{one.name} is of {one.dtype}"
        kinds = {one.name: (TYPES[one.dtype], one.shape) for one in tensors}
        model = self.model_runner.get_model()
        now = {name: one.data_ptr() for name, one in model.named_parameters()}
        known: tuple[dict[str, int], Places] = getattr(self, "_grpo_places", ({}, {}))
        places = known[1] if known[0] == now else {}  # a reload may have put parameters elsewhere
        if new := {name: one for name, one in kinds.items() if name not in places}:
            try:
                places |= places_of(model, new)
            except NotFollowed as error:
                return str(error)[:500]
        self._grpo_places = now, places
        return ""

    def apply_deltas(self: Any, deltas: Sequence[str], digests: Sequence[str]) -> None:
        """Put what has changed into the parameters, and read it back. `follow_loader` knows the tensors.

        Args:
            deltas: paths of files, one after the other.
            digests: of the weights before the first and after each.

        Raises Corrupt, OSError, ValueError: then the parameters are those of no policy.
        """
        places: Places = self._grpo_places[1]
        with ThreadPoolExecutor(delta.WORKERS) as pool, torch.no_grad():
            for path, base, weights in zip(deltas, digests[:-1], digests[1:], strict=True):
                for one in delta.changes_in(Path(path), base, weights, pool):
                    for begin in range(0, len(one.places), AT_A_TIME):
                        piece = slice(begin, begin + AT_A_TIME)
                        at = torch.from_numpy(one.places[piece]).to(self.device)
                        words = torch.from_numpy(one.values[piece].view(SIGNED[one.values.itemsize]))
                        values = words.to(self.device).view(TYPES[one.tensor.dtype])
                        if not all(part.write(at, values) for part in places[one.tensor.name]):
                            raise ValueError(f"{one.tensor.name} does not hold what was put into it")

    def differs(self: Any, path: str, first: int, step: int) -> str:
        """The first tensor that the parameters do not hold as the file at `path` does, bit for bit; empty if there
        is none. Of those that `follow_loader` knows, by name, each `step`th is compared from the `first`. Raises
        OSError."""
        places: Places = self._grpo_places[1]
        with safe_open(path, "pt") as file:
            for name in sorted(places.keys() & set(file.keys()))[first::step]:
                for part in places[name]:
                    wanted = part.of(file.get_tensor(name)).to(part.target.device, part.target.dtype)
                    if not torch.equal(bits(wanted), bits(part.target)):
                        return name
        return ""


class Extension(PositionSampling, Patching):
    """Draws by position, overwrites what has changed of its weights, and tells what became of an adapter and of
    weights that were awaited."""

    def reload_all(self: Any, path: str) -> None:
        """Read all weights from the folder `path`.

        vLLM's build for CPUs multiplies by packed copies of matrices. Of a head that is the embedding its reload
        leaves the old copy: only the embedding is in the file.
        """
        with packing_experts(self.get_model()):
            self.reload_weights(weights_path=path)
        for layer in self.get_model().modules():
            if hasattr(layer, "cpu_linear") and layer.weight.numel() > 0:  # packed, and kept beside the copy
                layer.quant_method.process_weights_after_loading(layer)

    def await_weights(self: Any) -> None:
        """From an engine that was started with `--load-format dummy`: read weights as usual from now on, and note
        which parameters have had theirs."""
        self.vllm_config.load_config.load_format = "auto"
        model = self.get_model()
        load, self.awaited_weights = model.load_weights, {name for name, _ in model.named_parameters()}

        def noting(weights: Any) -> Any:
            loaded = load(weights)
            self.awaited_weights -= loaded or set()
            return loaded

        model.load_weights = noting

    def not_loaded(self: Any) -> list[str]:
        """The parameters whose weights are still awaited."""
        return sorted(self.awaited_weights)

    def layers_without_place(self: Any, adapter: int) -> list[str] | None:
        """The layers of a loaded adapter that this worker's part of the model does not have; None if it does not
        hold the adapter.

        vLLM leaves them out without a word, and what an adapter that was left out computes is the base model:
        early in training that is too near for a canary to tell.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        held = manager.get_adapter(adapter)
        return None if held is None else sorted(held.loras.keys() - manager.modules.keys())


@contextlib.contextmanager
def packing_experts(model: Any) -> Iterator[None]:
    """Within, experts are packed for CPUs whenever they are loaded.

    vLLM's build for CPUs packs them at the first load alone (0.32, `_setup_kernel` of
    `UnquantizedFusedMoEMethod`): a reload leaves them as the file has them, where its kernel reads them packed.
    """
    found: list[Any] = [getattr(layer, "quant_method", None) for layer in model.modules()]
    methods = [one for one in dict.fromkeys(found) if hasattr(one, "unquantized_backend") and _packed_by(one)]
    for one in methods:
        one.process_weights_after_loading = partial(_process_and_pack, one, one.process_weights_after_loading)
    try:
        yield
    finally:
        for one in methods:
            del one.process_weights_after_loading  # the class has its own


def _packed_by(method: Any) -> Any:
    """The kernel's part that packs experts for a CPU; None where they are not packed."""
    experts: Any = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    return experts if hasattr(experts, "isa") else None


def _process_and_pack(method: Any, process: Any, layer: Any) -> None:
    process(layer)
    _packed_by(method).process_weights_after_loading(layer)
