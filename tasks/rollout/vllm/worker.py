"""What each worker of vLLM can do in addition, `--worker-extension-cls`, through `collective_rpc`."""

from __future__ import annotations

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
