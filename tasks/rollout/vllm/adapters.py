"""The one adapter in vLLM's engine, from within its server: put in the place of the one before, and taken out.

Requests ask for `MODEL`, and the server's registry of adapters says which one that is; without one there is no
such model, for the bare weights have another name. An adapter is known to the engine by a number of its own and by
its path, which names its content: vLLM keeps what it computed from a prompt by name and path. The engine's base
weights are never written.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from policies.serving.wire import MODEL


async def change_adapter(state: Any, path: str) -> str:
    """Take out the adapter that the engine has and have it load the one in the folder `path`.

    Nobody may be asking it: what is left of requests is aborted. Returns why it does not take it, and then it has
    none; empty where it does.

    Args:
        state: `app.state` of vLLM's server.
    """
    engine, models = state.engine_client, state.openai_serving_models
    await engine.engine_core.pause_scheduler_async(mode="abort", clear_cache=True)
    await drop_adapter(state)
    wanted = SimpleNamespace(lora_name=MODEL, lora_path=path, load_inplace=False, is_3d_lora_weight=False)
    said = await models.load_lora_adapter(wanted)  # as its endpoint for development does
    await engine.resume_generation()
    if not isinstance(said, str):
        return f"vLLM does not load the adapter: {said.error.message}"
    number = models.lora_requests[MODEL].lora_int_id
    if homeless := _everywhere(await engine.collective_rpc("layers_without_place", args=(number,))):
        await drop_adapter(state)
        return (
            f"vLLM's model has no place for the adapter of {homeless[0]}, nor for {len(homeless) - 1} more;"
            " rollout.vllm.enable-lora: false has adapters merged instead"
        )
    return ""


async def drop_adapter(state: Any) -> None:
    """Take out the adapter that the engine has, if it has one."""
    held = state.openai_serving_models.lora_requests.pop(MODEL, None)
    if held is not None:
        await state.engine_client.remove_lora(held.lora_int_id)


def _everywhere(found: list[list[str] | None]) -> list[str]:
    """What all workers lack: where the model's layers are divided over them, each lacks those of the others."""
    if any(one is None for one in found):
        return ["any layer: a worker does not hold it"]
    return sorted(set.intersection(*(set(one or ()) for one in found)))
