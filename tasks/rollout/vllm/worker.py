"""Extension of vLLM's workers (`--worker-extension-cls`), called through `collective_rpc`."""

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

from grpo_orch.checkpoint.weights import delta
from grpo_orch.tasks.rollout.vllm.loader_trace import LoaderNotTraced, Places, bits, places_of

# Sampling as a function of a request's seed and a token's position.
#
# vLLM's older model runner draws from one random stream per request, which restarts when the request continues on
# another server. Its newer one (with Triton, so on GPUs) draws by seed and position. With this extension the older
# one does so, too: before each draw a request's generator is seeded with the number of SplitMix64 at the token's
# position. The draw then does not depend on the server, the batch, or a preemption inside vLLM.
#
# This imports nothing of vLLM, and replaces only its generators. Each boot tests the result, see
# `tasks.rollout.vllm.server.Server.sample_by_position`.

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class PositionSampling:
    """Worker methods for sampling by position."""

    def sample_by_position(self: Any) -> str:
        """Draw by seed and position from now on. Returns a reason if that is impossible, else an empty text."""
        if self.vllm_config.speculative_config is not None:
            return "with speculative decoding a draw depends on the draft tokens before it"
        if self.use_v2_model_runner:
            return ""  # draws by position already
        runner = self.model_runner
        try:
            _ = runner.requests, runner.input_batch.req_ids, runner.optimistic_seq_lens_cpu
            generators, sampler = runner.input_batch.generators, runner.sampler
        except AttributeError as error:
            return f"this vLLM's model runner is unknown: {error}"
        if not isinstance(generators, dict) or not isinstance(sampler, torch.nn.Module):
            return "this vLLM's model runner stores its generators in an unknown way"
        sampler.register_forward_pre_hook(_Seeding(runner), with_kwargs=True)
        return ""


class Generator(torch.Generator):  # type: ignore[misc]
    """A generator that is seeded before each draw, so that draws need not be undone.

    vLLM undoes the draws for a partly computed prompt by an offset, which CPU generators lack; there it would end
    the engine.
    """

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Do nothing: the next draw does not depend on the offset."""


class _Seeding:
    """Seeds a runner's generators for the tokens that its sampler is about to draw."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __call__(self, _sampler: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        runner, batch = self._runner, self._runner.input_batch
        if not batch.generators or kwargs["sampling_metadata"].generators is not batch.generators:
            return  # no request has a seed, or this is a run on dummy requests
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
    """Return the numbers at `positions`, from 0, of the SplitMix64 sequences with these seeds (signed 64 bits)."""
    steps = np.array(positions, np.uint64) + np.uint64(1)
    number: np.ndarray[Any, np.dtype[np.uint64]] = np.array(seeds, np.int64).view(np.uint64) + steps * _GOLDEN
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))


# Deltas of weights, written to the parameters inside vLLM's workers or compared with them.

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
SIGNED = {1: "u1", 2: "<i2", 4: "<i4", 8: "<i8"}  # numpy's integer types that torch accepts
BATCH_ELEMENTS = 2**22  # indices for a batch take 0.3 GB in addition to the model


class Patching:
    """Worker methods that apply deltas to the parameters."""

    def follow_loader(self: Any, deltas: Sequence[str]) -> str:
        """Find the deltas' tensors in the parameters, without changing anything.

        Returns a reason if that is impossible, else an empty text. Raises Corrupt, OSError.
        """
        tensors = [tensor for path in deltas for tensor in delta.index_of(Path(path)).tensors]
        for tensor in tensors:
            if tensor.dtype not in TYPES:
                return f"{tensor.name} has the unsupported type {tensor.dtype}"
        kinds = {tensor.name: (TYPES[tensor.dtype], tensor.shape) for tensor in tensors}
        model = self.model_runner.get_model()
        addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        known: tuple[dict[str, int], Places] = getattr(self, "_grpo_places", ({}, {}))
        places = known[1] if known[0] == addresses else {}  # a reload may have moved parameters
        if new := {name: kind for name, kind in kinds.items() if name not in places}:
            try:
                places |= places_of(model, new)
            except LoaderNotTraced as error:
                return str(error)[:500]
        self._grpo_places = addresses, places
        return ""

    def apply_deltas(self: Any, deltas: Sequence[str], digests: Sequence[str]) -> None:
        """Write deltas to the parameters and read the values back. Call `follow_loader` first.

        Args:
            deltas: paths of consecutive deltas.
            digests: of the weights before the first and after each.

        Raises Corrupt, OSError, ValueError: then the parameters do not hold any policy.
        """
        places: Places = self._grpo_places[1]
        with ThreadPoolExecutor(delta.WORKERS) as pool, torch.no_grad():
            for path, base, weights in zip(deltas, digests[:-1], digests[1:], strict=True):
                for change in delta.changes_in(Path(path), base, weights, pool):
                    for begin in range(0, len(change.places), BATCH_ELEMENTS):
                        batch = slice(begin, begin + BATCH_ELEMENTS)
                        at = torch.from_numpy(change.places[batch]).to(self.device)
                        words = torch.from_numpy(change.values[batch].view(SIGNED[change.values.itemsize]))
                        values = words.to(self.device).view(TYPES[change.tensor.dtype])
                        if not all(part.write(at, values) for part in places[change.tensor.name]):
                            raise ValueError(f"{change.tensor.name} does not hold the values written to it")

    def find_difference(self: Any, path: str, first: int, step: int) -> str:
        """Return the first tensor whose bits differ from the file at `path`; empty if all are equal.

        Compares each `step`th tensor, by name from the `first`, of those that `follow_loader` found. Raises
        OSError.
        """
        places: Places = self._grpo_places[1]
        with safe_open(path, "pt") as file:
            for name in sorted(places.keys() & set(file.keys()))[first::step]:
                for part in places[name]:
                    wanted = part.of(file.get_tensor(name)).to(part.target.device, part.target.dtype)
                    if not torch.equal(bits(wanted), bits(part.target)):
                        return name
        return ""


class Extension(PositionSampling, Patching):
    """All methods added to vLLM's workers."""

    def reload_all(self: Any, path: str) -> None:
        """Read all weights from the folder `path`.

        vLLM's CPU build multiplies by packed copies of matrices. For a head tied to the embedding, vLLM's reload
        keeps the old copy, since the file has only the embedding; so these layers are packed here.
        """
        with packing_experts(self.get_model()):
            self.reload_weights(weights_path=path)
        for layer in self.get_model().modules():
            if hasattr(layer, "cpu_linear") and layer.weight.numel() > 0:  # packed, with the original kept
                layer.quant_method.process_weights_after_loading(layer)

    def await_weights(self: Any) -> None:
        """Switch an engine started with `--load-format dummy` to normal loading, and track missing weights."""
        self.vllm_config.load_config.load_format = "auto"
        model = self.get_model()
        load, self.awaited_weights = model.load_weights, {name for name, _ in model.named_parameters()}

        def load_and_track(weights: Any) -> Any:
            loaded = load(weights)
            self.awaited_weights -= loaded or set()
            return loaded

        model.load_weights = load_and_track

    def missing_weights(self: Any) -> list[str]:
        """Return the parameters without weights so far."""
        return sorted(self.awaited_weights)

    def unmatched_layers(self: Any, adapter: int) -> list[str] | None:
        """Return layers of a loaded adapter that this worker's part of the model lacks; None without the adapter.

        vLLM silently ignores them. The engine would then compute nearly the base model, and early in training a
        canary cannot distinguish that from the policy.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        held = manager.get_adapter(adapter)
        return None if held is None else sorted(held.loras.keys() - manager.modules.keys())


@contextlib.contextmanager
def packing_experts(model: Any) -> Iterator[None]:
    """Pack experts for the CPU after each load inside the context.

    vLLM's CPU build packs them only at the first load (0.32, `_setup_kernel` of `UnquantizedFusedMoEMethod`). A
    reload leaves them unpacked, but the kernel expects packed ones.
    """
    candidates: list[Any] = [getattr(layer, "quant_method", None) for layer in model.modules()]
    methods = [
        method
        for method in dict.fromkeys(candidates)
        if hasattr(method, "unquantized_backend") and _packing_experts_of(method)
    ]
    for method in methods:
        process = method.process_weights_after_loading
        method.process_weights_after_loading = partial(_process_and_pack, method, process)
    try:
        yield
    finally:
        for method in methods:
            del method.process_weights_after_loading  # restores the method of the class


def _packing_experts_of(method: Any) -> Any:
    """Return the kernel object that packs experts for a CPU; None if they are not packed."""
    experts: Any = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    return experts if hasattr(experts, "isa") else None


def _process_and_pack(method: Any, process: Any, layer: Any) -> None:
    process(layer)
    _packing_experts_of(method).process_weights_after_loading(layer)
