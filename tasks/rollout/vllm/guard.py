"""Guards a rollout node: ASGI middleware in vLLM's server, `--middleware tasks.rollout.vllm.guard.Guard`.

A completion is let through only if it is meant for this boot and for the policy that is loaded at that moment, and
a change of weights first ends every completion that runs, so that none is ever made of two policies. New weights
serve nobody until the engine has computed the policy's canary. Only the agent beside it may change weights, or how
tokens are drawn. vLLM's development endpoints, which let anyone do so, are not needed, and every path that is not
named here does not exist.

The engine is reached as vLLM's own endpoints reach it, through `app.state.engine_client`; nothing of vLLM is
imported. With more than one API server process (`--api-server-count`) only one of them would learn of new weights;
the others go on refusing.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from checkpoint.store import layout
from policies.model.node_contract import TOKEN_ENV
from policies.serving import wire
from policies.serving.canary import QUANTISED, Canary, disagreement
from policies.serving.wire import HEADER_BOOT, HEADER_POLICY, MODEL, LoadPolicy, ProvePolicy
from tasks.rollout.vllm.asgi import (
    App,
    Message,
    Receive,
    Scope,
    Send,
    answer,
    ask,
    bears,
    body_of,
    is_local,
    model_of,
)

# New weights for vLLM's engine, from within its server: reloaded whole, overwritten where they have changed, and
# first of all both, to find out whether that comes to the same.
#
# What is computed from parameters when they are loaded, as packed matrices of CPUs or what some attention folds
# into one, does not follow parameters that are overwritten. Nothing tells which models have such; so for every
# boot of an engine the first changes are tried: overwritten and reloaded, the engine must compute the same bits,
# and its parameters must be the file's where the changes went.


async def reload(engine: Any, path: str) -> None:
    """Have it read all weights from the folder `path`."""
    await _paused(engine, "reload_all", (path,))


async def overwrite(engine: Any, wanted: LoadPolicy) -> None:
    """Have it overwrite what has changed. Raises what a worker raises: then its weights are those of no policy."""
    if why := await _follow(engine, wanted):
        raise ValueError(f"the loader of this model was followed before, and is not now: {why}")
    await _paused(engine, "apply_deltas", (wanted.deltas, wanted.digests))


async def both_ways(engine: Any, wanted: LoadPolicy, computed: Callable[[], Awaitable[list[float]]]) -> str:
    """Have it overwrite what has changed, then read all weights. Returns why the two are not the same.

    Args:
        computed: what the engine computes of a fixed text.
    """
    if why := await _follow(engine, wanted):
        await reload(engine, wanted.path)
        return f"vLLM's loader of this model cannot be followed: {why}"
    await _paused(engine, "apply_deltas", (wanted.deltas, wanted.digests))
    overwritten = await computed()
    await reload(engine, wanted.path)
    reloaded = await computed()
    if overwritten != reloaded:
        return "with weights that were overwritten it does not compute what it does with reloaded ones"
    if why := await _follow(engine, wanted):  # a reload may have moved parameters
        return f"vLLM's loader of this model cannot be followed: {why}"
    if name := await differs(engine, str(Path(wanted.path) / layout.MODEL), 0, 1):
        return f"after a reload {name} is not in the parameters as it is in the file"
    return ""


async def differs(engine: Any, path: str, first: int, step: int) -> str:
    """A tensor that the engine does not hold as the file at `path` does, of each `step`th from the `first`."""
    return max(map(str, await engine.collective_rpc("differs", args=(path, first, step))))


async def _follow(engine: Any, wanted: LoadPolicy) -> str:
    return max(map(str, await engine.collective_rpc("follow_loader", args=(wanted.deltas,))))


async def _paused(engine: Any, method: str, args: tuple[Any, ...]) -> None:
    # Nothing runs by now; should anything be left in the engine, it is aborted here and not continued. The caches
    # go too: what was computed from a prompt with the old weights is worthless. `engine.pause_generation` is the
    # same, with a pause of 20 ms for the comfort of callers.
    await engine.engine_core.pause_scheduler_async(mode="abort", clear_cache=True)
    await engine.collective_rpc(method, args=args)
    await engine.resume_generation()


# The one adapter in vLLM's engine, from within its server: put in the place of the one before, and taken out.
#
# Requests ask for `MODEL`, and the server's registry of adapters says which one that is; without one there is no
# such model, for the bare weights have another name. An adapter is known to the engine by a number of its own and
# by its path, which names its content: vLLM keeps what it computed from a prompt by name and path. The engine's
# base weights are never written.


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


class _Refused(Exception):
    """Why the engine does not compute what the policy's trainer does, in a line."""


class Guard:
    """The middleware. Its secrets are in the environment: GRPO_ORCH_TOKEN, which the run's parties share,
    GRPO_ORCH_NODE_SECRET, which only the agent has, and GRPO_ORCH_BOOT, which names this life of the server."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._token = os.environ[TOKEN_ENV]
        self._secret = os.environ["GRPO_ORCH_NODE_SECRET"]
        self._boot_id = os.environ["GRPO_ORCH_BOOT"]
        self._policy: str | None = None  # what the engine holds; None while it is base weights or changing
        self._bare = False  # whether it never had weights
        self._adapter = False  # whether it is one, beside base weights that vLLM serves under another name
        self._running: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "lifespan":
                await self._app(scope, receive, send)
            case "http":
                await self._http(scope, receive, send)
            case _:
                return  # the server closes a websocket that nobody accepts

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1").lower(): value for name, value in scope["headers"]}
        agent = is_local(scope) and bears(headers, self._secret)
        match (scope["method"], scope["path"]):
            case ("PUT", "/grpo/policy") if agent:
                await self._load(scope, receive, send)
            case ("PUT", "/grpo/proof") if agent:
                await self._prove(scope, receive, send)
            case ("PUT", "/grpo/sampling") if agent:
                said = await scope["app"].state.engine_client.collective_rpc("sample_by_position")
                await answer(send, 200, "; ".join(sorted(set(said) - {""})))
            case ("PUT", "/grpo/bare") if agent:
                await scope["app"].state.engine_client.collective_rpc("await_weights")
                self._bare = True
                await answer(send, 204, "")
            case ("POST", wire.COMPLETIONS) if agent:  # the agent's trial, before anybody is let in
                await self._app(scope, receive, send)
            case ("GET", "/grpo/engine") if agent:
                await answer(send, 200, engine_limits(scope["app"].state.engine_client.vllm_config))
            case ("GET", "/metrics") if agent:
                await self._app(scope, receive, send)
            case _ if not bears(headers, self._token):
                await answer(send, 401, "")
            case ("GET", "/health" | "/metrics"):
                await self._app(scope, receive, send)
            case ("POST", wire.COMPLETIONS):
                await self._complete(scope, receive, send, headers)
            case ("POST", wire.RENDER | wire.DERENDER):  # text and tokens alone: no weights take part
                await self._translate(scope, receive, send, headers)
            case _:
                await answer(send, 404, "not an endpoint of a rollout node")

    async def _complete(self, scope: Scope, receive: Receive, send: Send, headers: dict[str, bytes]) -> None:
        if self._adapter:  # before the policy is looked at: what it is then, it is when vLLM begins
            model, receive = await model_of(receive)
            if model != wire.MODEL:
                await answer(send, 404, f"there is one model, `{wire.MODEL}`")
                return
        asked = [headers.get(name.lower(), b"").decode("latin-1") for name in (HEADER_BOOT, HEADER_POLICY)]
        if asked != [self._boot_id, self._policy]:
            await answer(send, 409, f"this is boot {self._boot_id} with policy {self._policy}")
            return
        started = complete = False

        async def watched(message: Message) -> None:
            nonlocal started, complete
            started = True
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        task = asyncio.ensure_future(self._app(scope, receive, watched))
        self._running.add(task)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            self._running.discard(task)
        if not task.cancelled():
            task.result()
        if complete:
            return
        if started:
            event = {"error": {"message": "the weights change", "code": 409}}
            body = f"data: {json.dumps(event)}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": False})
        else:
            await answer(send, 409, "the weights change")

    async def _translate(self, scope: Scope, receive: Receive, send: Send, headers: dict[str, bytes]) -> None:
        if headers.get(HEADER_BOOT.lower(), b"").decode("latin-1") != self._boot_id:
            await answer(send, 409, f"this is boot {self._boot_id}")
        else:
            await self._app(scope, receive, send)

    async def _load(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Load a policy that the agent has verified, and let it be asked for once the engine computes its canary
        as the trainer does. Any failure leaves the node without one: the agent sees 422 and the reason, or 500 and
        the error in vLLM's log, and starts the server anew. After a trial of changes it sees 200 and why they are
        of no use here, nothing where they are."""
        try:
            wanted = msgspec.json.decode(await body_of(receive), type=LoadPolicy)
        except msgspec.DecodeError as error:
            await answer(send, 400, str(error))
            return
        tried = None
        async with self._changing:
            if wanted.version != self._policy:
                if wanted.base and wanted.base != self._policy:
                    await answer(send, 400, f"the changes are to {wanted.base}, and this holds {self._policy}")
                    return
                self._policy, self._adapter = None, wanted.adapter  # from here on nobody is let in
                await self._end_running()
                try:
                    tried = await self._change(scope, wanted)
                except _Refused as refused:
                    if wanted.adapter:
                        await drop_adapter(scope["app"].state)
                    await answer(send, 422, str(refused))
                    return
                self._policy = wanted.version
        await answer(send, 204 if tried is None else 200, tried or "")

    async def _change(self, scope: Scope, wanted: LoadPolicy) -> str | None:
        """Give the engine the policy; after a trial of changes, why they are of no use. Raises _Refused."""
        state, canary, tried = scope["app"].state, wanted.canary, None

        async def computed() -> list[float]:
            return await self._logprobs(scope, state.engine_client, canary) if canary is not None else []

        if wanted.adapter:
            if why := await change_adapter(state, wanted.path):
                raise _Refused(why)
        elif wanted.base and wanted.path:
            tried = await both_ways(state.engine_client, wanted, computed)
        elif wanted.base:
            await overwrite(state.engine_client, wanted)
        else:
            await reload(state.engine_client, wanted.path)
            if self._bare:
                if why := await _lacks(state.engine_client):
                    raise _Refused(why)
                self._bare = False
        if canary is not None and (
            why := disagreement(canary, await computed(), _computes_in(state.engine_client))
        ):
            raise _Refused(why)
        return tried

    async def _prove(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compare some of the engine's tensors with a file's: 200, or 422 and one that differs, and then nobody is
        let in. 204 where the engine holds another policy than the file."""
        said = msgspec.json.decode(await body_of(receive), type=ProvePolicy)
        async with self._changing:
            if said.version != self._policy:
                await answer(send, 204, "")
                return
            name = await differs(scope["app"].state.engine_client, said.path, said.first, said.step)
            if name:
                self._policy = None
                await self._end_running()
        await answer(send, 422 if name else 200, f"{name} is not what the file holds" if name else "")

    async def _logprobs(self, scope: Scope, engine: Any, canary: Canary) -> list[float]:
        """What the engine computes of the canary's text. Raises _Refused."""
        # The engine makes one token after the text, for which its context must have room.
        token_ids = canary.token_ids[: engine.model_config.max_model_len - 1]
        body = {
            "model": wire.MODEL,
            "prompt": token_ids,
            "prompt_logprobs": 0,  # of the prompt's own tokens; vLLM takes them from no cache
            "max_tokens": 1,
            "temperature": 0.0,
        }
        status, said = await ask(self._app, scope, wire.COMPLETIONS, body)
        if status != 200:
            said = said[:500]
            raise _Refused(f"the engine does not compute the canary: {status} {said.decode(errors='replace')}")
        rows = json.loads(said)["choices"][0]["prompt_logprobs"][1:]  # nothing is before the first
        return [float(row[str(token)]["logprob"]) for row, token in zip(rows, token_ids[1:], strict=True)]

    async def _end_running(self) -> None:
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(set(self._running))


async def _lacks(engine: Any) -> str:
    """Why an engine that had no weights has not got all of them; empty where it has."""
    lacking = {name for worker in await engine.collective_rpc("not_loaded") for name in worker}
    return f"without weights after its first policy: {min(lacking)} and {len(lacking) - 1} more" if lacking else ""


def _computes_in(engine: Any) -> str:
    """What the engine computes in, as the canary's rule has it."""
    config = engine.vllm_config
    if config.model_config.quantization or str(config.cache_config.cache_dtype).startswith("fp8"):
        return QUANTISED
    return str(config.model_config.dtype).removeprefix("torch.")


def engine_limits(config: Any) -> str:
    """What the engine takes, as JSON: requests at a time, and tokens that it has room for."""
    cache = config.cache_config
    kv_tokens = (cache.num_gpu_blocks or 0) * (cache.block_size or 0)
    engines = config.parallel_config.data_parallel_size  # each takes so many
    return json.dumps({"max_requests": engines * config.scheduler_config.max_num_seqs, "kv_tokens": kv_tokens})
