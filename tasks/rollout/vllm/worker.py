"""What each worker of vLLM can do in addition, `--worker-extension-cls`, through `collective_rpc`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from tasks.rollout.patching.worker import Patching
from tasks.rollout.vllm.sampling import PositionSampling


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
