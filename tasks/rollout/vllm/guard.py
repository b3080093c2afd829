"""ASGI middleware that guards a rollout node's vLLM server, loaded by vLLM's `--middleware` (`flags.py`).

It accepts a completion only for this boot and the currently loaded policy. A change of weights first aborts all
running completions, so that no completion mixes two policies, and new weights serve no request until the engine
has reproduced the policy's canary. Only the node's agent may change weights or the sampling method. vLLM's
development endpoints, which let any client do so, are not needed; all other paths answer 404.

The middleware uses the engine through `app.state.engine_client`, like vLLM's own endpoints, and imports nothing of
vLLM. With more than one API server process (`--api-server-count`) only one of them would get new weights; the
others keep refusing requests.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from grpo_orch.checkpoint.store import layout
from grpo_orch.policies.model.node_contract import TOKEN_ENV
from grpo_orch.policies.serving import wire
from grpo_orch.policies.serving.canary import QUANTISED, Canary, disagreement
from grpo_orch.policies.serving.wire import HEADER_BOOT, HEADER_POLICY, MODEL, LoadPolicy, ProvePolicy

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_LOOPBACK = ("127.0.0.1", "::1")

# New weights are loaded in full, or deltas are applied to the parameters.
#
# Data that vLLM computes from parameters while loading, such as packed matrices on CPUs or matrices folded into
# one by some attention layers, does not change with a parameter. There is no list of the affected models. So for
# every boot the first deltas are tested: the engine must compute the same bits with applied deltas as after a full
# load, and its parameters must equal the file's.


async def reload(engine: Any, path: str) -> None:
    """Load all weights from the folder `path`."""
    await _paused(engine, "reload_all", (path,))


async def overwrite(engine: Any, wanted: LoadPolicy) -> None:
    """Apply deltas. Raises what a worker raises; then the engine does not hold any policy."""
    if reason := await _follow(engine, wanted):
        raise ValueError(f"the loader of this model was traced before, but cannot be traced now: {reason}")
    await _paused(engine, "apply_deltas", (wanted.deltas, wanted.digests))


async def try_both(engine: Any, wanted: LoadPolicy, compute: Callable[[], Awaitable[list[float]]]) -> str:
    """Apply deltas, then load all weights. Returns how the results differ, or an empty text.

    Args:
        compute: returns what the engine computes for a fixed text.
    """
    if reason := await _follow(engine, wanted):
        await reload(engine, wanted.path)
        return f"cannot trace vLLM's loader of this model: {reason}"
    await _paused(engine, "apply_deltas", (wanted.deltas, wanted.digests))
    after_delta = await compute()
    await reload(engine, wanted.path)
    after_reload = await compute()
    if after_delta != after_reload:
        return "the engine computes different log-probabilities after a delta than after a full load"
    if reason := await _follow(engine, wanted):  # a reload may have moved parameters
        return f"cannot trace vLLM's loader of this model: {reason}"
    if name := await find_difference(engine, str(Path(wanted.path) / layout.MODEL), 0, 1):
        return f"after a full load the parameters of {name} differ from the file"
    return ""


async def find_difference(engine: Any, path: str, first: int, step: int) -> str:
    """Return a tensor that differs from the file at `path`, or an empty text, see `Patching.find_difference`."""
    return max(map(str, await engine.collective_rpc("find_difference", args=(path, first, step))))


async def _follow(engine: Any, wanted: LoadPolicy) -> str:
    return max(map(str, await engine.collective_rpc("follow_loader", args=(wanted.deltas,))))


async def _paused(engine: Any, method: str, args: tuple[Any, ...]) -> None:
    # No completion runs any more; this aborts remaining requests instead of continuing them, and clears the prefix
    # caches of the old weights. `engine.pause_generation` does the same, but also sleeps for 20 ms.
    await engine.engine_core.pause_scheduler_async(mode="abort", clear_cache=True)
    await engine.collective_rpc(method, args=args)
    await engine.resume_generation()


# The engine holds one adapter, and base weights that never change.
#
# Requests name `MODEL`, which the server's registry maps to the adapter. Without an adapter that model does not
# exist, since the base weights have another name. Each adapter has its own number and a path that identifies its
# content: vLLM's prefix cache is keyed by name and path.


async def change_adapter(state: Any, path: str) -> str:
    """Replace the engine's adapter by the one in the folder `path`. Aborts remaining requests.

    Returns a reason if that fails, and then the engine has no adapter; else an empty text.

    Args:
        state: `app.state` of vLLM's server.
    """
    engine, models = state.engine_client, state.openai_serving_models
    await engine.engine_core.pause_scheduler_async(mode="abort", clear_cache=True)
    await drop_adapter(state)
    wanted = SimpleNamespace(lora_name=MODEL, lora_path=path, load_inplace=False, is_3d_lora_weight=False)
    loaded = await models.load_lora_adapter(wanted)  # like vLLM's development endpoint
    await engine.resume_generation()
    if not isinstance(loaded, str):
        return f"vLLM refused the adapter: {loaded.error.message}"
    number = models.lora_requests[MODEL].lora_int_id
    if unmatched := _unmatched_everywhere(await engine.collective_rpc("unmatched_layers", args=(number,))):
        await drop_adapter(state)
        return (
            f"adapter layers that vLLM's model lacks: {unmatched[0]} and {len(unmatched) - 1} more;"
            " set rollout.vllm.enable-lora: false to merge adapters"
        )
    return ""


async def drop_adapter(state: Any) -> None:
    """Remove the engine's adapter, if it has one."""
    held = state.openai_serving_models.lora_requests.pop(MODEL, None)
    if held is not None:
        await state.engine_client.remove_lora(held.lora_int_id)


def _unmatched_everywhere(by_worker: list[list[str] | None]) -> list[str]:
    """Return layers that all workers lack. With sharded layers, each worker lacks those of the others."""
    if any(layers is None for layers in by_worker):
        return ["any layer (a worker does not hold the adapter)"]
    return sorted(set.intersection(*(set(layers or ()) for layers in by_worker)))


class _Refused(Exception):
    """The policy is refused. The one-line message explains how the engine disagrees with the trainer."""


class Guard:
    """The middleware.

    Its secrets are in the environment: GRPO_ORCH_TOKEN, which all parties of the run share; GRPO_ORCH_NODE_SECRET,
    which only the agent has; and GRPO_ORCH_BOOT, which identifies this boot of the server.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._token = os.environ[TOKEN_ENV]
        self._secret = os.environ["GRPO_ORCH_NODE_SECRET"]
        self._boot_id = os.environ["GRPO_ORCH_BOOT"]
        self._policy: str | None = None  # None with base weights and during a change
        self._is_bare = False  # the engine has never had weights
        self._has_adapter = False  # the policy is an adapter; vLLM serves the base weights under another name
        self._running: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "lifespan":
                await self._app(scope, receive, send)
            case "http":
                await self._http(scope, receive, send)
            case _:
                return  # the server closes a websocket that is not accepted

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. docs/http.md lists the cases with the comments behind them."""
        headers = {name.decode("latin-1").lower(): value for name, value in scope["headers"]}
        is_agent = is_local(scope) and has_secret(headers, self._secret)
        match (scope["method"], scope["path"]):
            case ("PUT", "/grpo/policy") if is_agent:  # loads a policy; 422 with the reason if that fails
                await self._load(scope, receive, send)
            case ("PUT", "/grpo/proof") if is_agent:  # compares some of the engine's tensors with a file
                await self._prove(scope, receive, send)
            case ("PUT", "/grpo/sampling") if is_agent:  # samples by seed and position; answers why not, if so
                reasons = await scope["app"].state.engine_client.collective_rpc("sample_by_position")
                await answer(send, 200, "; ".join(sorted(set(reasons) - {""})))
            case ("PUT", "/grpo/bare") if is_agent:  # marks an engine that started without weights
                await scope["app"].state.engine_client.collective_rpc("await_weights")
                self._is_bare = True
                await answer(send, 204, "")
            case ("POST", wire.COMPLETIONS) if is_agent:  # its trial, before other requests are accepted
                await self._app(scope, receive, send)
            case ("GET", "/grpo/engine") if is_agent:  # the engine's limits
                await answer(send, 200, engine_limits(scope["app"].state.engine_client.vllm_config))
            case ("GET", "/metrics") if is_agent:  # vLLM's metrics
                await self._app(scope, receive, send)
            case _ if not has_secret(headers, self._token):
                await answer(send, 401, "")
            case ("GET", "/health" | "/metrics"):  # vLLM's
                await self._app(scope, receive, send)
            case ("POST", wire.COMPLETIONS):  # vLLM's, for this boot and the loaded policy, else 409
                await self._complete(scope, receive, send, headers)
            case ("POST", wire.RENDER | wire.DERENDER):  # vLLM's: text to tokens and back, without weights
                await self._translate(scope, receive, send, headers)
            case _:
                await answer(send, 404, "not an endpoint of a rollout node")

    async def _complete(self, scope: Scope, receive: Receive, send: Send, headers: dict[str, bytes]) -> None:
        if self._has_adapter:  # first, since the policy must not change between its check and vLLM's start
            model, receive = await model_of(receive)
            if model != wire.MODEL:
                await answer(send, 404, f"unknown model; this node serves `{wire.MODEL}`")
                return
        addressed = [headers.get(name.lower(), b"").decode("latin-1") for name in (HEADER_BOOT, HEADER_POLICY)]
        if addressed != [self._boot_id, self._policy]:
            await answer(send, 409, f"this is boot {self._boot_id} with policy {self._policy}")
            return
        is_started = is_complete = False

        async def watched_send(message: Message) -> None:
            nonlocal is_started, is_complete
            is_started = True
            await send(message)
            is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        task = asyncio.ensure_future(self._app(scope, receive, watched_send))
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
        if is_complete:
            return
        if is_started:
            event = {"error": {"message": "aborted by a change of weights", "code": 409}}
            body = f"data: {json.dumps(event)}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": False})
        else:
            await answer(send, 409, "aborted by a change of weights")

    async def _translate(self, scope: Scope, receive: Receive, send: Send, headers: dict[str, bytes]) -> None:
        if headers.get(HEADER_BOOT.lower(), b"").decode("latin-1") != self._boot_id:
            await answer(send, 409, f"this is boot {self._boot_id}")
        else:
            await self._app(scope, receive, send)

    async def _load(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Load a policy that the agent has verified, and serve it once the engine reproduces its canary.

        Any failure leaves the node without a policy: the agent gets 422 and the reason, or 500 with the error in
        vLLM's log, and restarts the server. After a test of deltas it gets 200 and the reason why they do not work
        here, if any.
        """
        try:
            wanted = msgspec.json.decode(await body_of(receive), type=LoadPolicy)
        except msgspec.DecodeError as error:
            await answer(send, 400, str(error))
            return
        test_result = None
        async with self._changing:
            if wanted.version != self._policy:
                if wanted.base and wanted.base != self._policy:
                    message = f"the delta is based on {wanted.base}, but the engine holds {self._policy}"
                    await answer(send, 400, message)
                    return
                self._policy, self._has_adapter = None, wanted.adapter  # from here on no request is accepted
                await self._end_running()
                try:
                    test_result = await self._change(scope, wanted)
                except _Refused as refused:
                    if wanted.adapter:
                        await drop_adapter(scope["app"].state)
                    await answer(send, 422, str(refused))
                    return
                self._policy = wanted.version
        await answer(send, 204 if test_result is None else 200, test_result or "")

    async def _change(self, scope: Scope, wanted: LoadPolicy) -> str | None:
        """Load the policy into the engine. Returns the result of a test of deltas, if any. Raises _Refused."""
        state, canary, test_result = scope["app"].state, wanted.canary, None

        async def compute() -> list[float]:
            return await self._logprobs(scope, state.engine_client, canary) if canary is not None else []

        if wanted.adapter:
            if reason := await change_adapter(state, wanted.path):
                raise _Refused(reason)
        elif wanted.base and wanted.path:
            test_result = await try_both(state.engine_client, wanted, compute)
        elif wanted.base:
            await overwrite(state.engine_client, wanted)
        else:
            await reload(state.engine_client, wanted.path)
            if self._is_bare:
                if reason := await _find_missing(state.engine_client):
                    raise _Refused(reason)
                self._is_bare = False
        if canary is not None and (
            reason := disagreement(canary, await compute(), _precision_of(state.engine_client))
        ):
            raise _Refused(reason)
        return test_result

    async def _prove(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compare some of the engine's tensors with a file.

        Answers 200 if they are equal; 422 with the name of one that differs, after which no request is accepted;
        204 if the engine holds another policy.
        """
        wanted = msgspec.json.decode(await body_of(receive), type=ProvePolicy)
        async with self._changing:
            if wanted.version != self._policy:
                await answer(send, 204, "")
                return
            engine = scope["app"].state.engine_client
            name = await find_difference(engine, wanted.path, wanted.first, wanted.step)
            if name:
                self._policy = None
                await self._end_running()
        await answer(send, 422 if name else 200, f"{name} differs from the file" if name else "")

    async def _logprobs(self, scope: Scope, engine: Any, canary: Canary) -> list[float]:
        """Return the engine's log-probabilities of the canary's text. Raises _Refused."""
        # The context must have space for the token that the engine generates after the text.
        token_ids = canary.token_ids[: engine.model_config.max_model_len - 1]
        body = {
            "model": wire.MODEL,
            "prompt": token_ids,
            "prompt_logprobs": 0,  # only the prompt's own tokens; vLLM never caches these
            "max_tokens": 1,
            "temperature": 0.0,
        }
        status, content = await post(self._app, scope, wire.COMPLETIONS, body)
        if status != 200:
            text = content[:500].decode(errors="replace")
            raise _Refused(f"the engine failed to compute the canary: {status} {text}")
        rows = json.loads(content)["choices"][0]["prompt_logprobs"][1:]  # the first token has no log-probability
        return [float(row[str(token)]["logprob"]) for row, token in zip(rows, token_ids[1:], strict=True)]

    async def _end_running(self) -> None:
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(set(self._running))


async def _find_missing(engine: Any) -> str:
    """Describe parameters that the first policy did not set; empty if it set all."""
    missing = {name for worker in await engine.collective_rpc("missing_weights") for name in worker}
    return f"the first policy has no weights for {min(missing)} and {len(missing) - 1} more" if missing else ""


def _precision_of(engine: Any) -> str:
    """Return the engine's precision, as `disagreement` names it."""
    config = engine.vllm_config
    if config.model_config.quantization or str(config.cache_config.cache_dtype).startswith("fp8"):
        return QUANTISED
    return str(config.model_config.dtype).removeprefix("torch.")


def engine_limits(config: Any) -> str:
    """Return the engine's limits as JSON: concurrent requests, and tokens in its KV cache."""
    cache = config.cache_config
    kv_tokens = (cache.num_gpu_blocks or 0) * (cache.block_size or 0)
    engines = config.parallel_config.data_parallel_size  # max_num_seqs is for each of them
    return json.dumps({"max_requests": engines * config.scheduler_config.max_num_seqs, "kv_tokens": kv_tokens})


# Requests and answers of ASGI.


class _Named(msgspec.Struct):
    """The field of a completion's body that the guard needs."""

    model: str | None = None


async def post(app: App, scope: Scope, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Send a request to the server from inside the guard. Returns the response's status and body."""
    status, content = 500, b""
    messages: asyncio.Queue[Message] = asyncio.Queue()  # vLLM waits on it for a disconnect, which never comes
    messages.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})

    async def send(message: Message) -> None:
        nonlocal status, content
        if message["type"] == "http.response.start":
            status = message["status"]
        content += message.get("body", b"")

    headers = [(b"content-type", b"application/json")]
    request = {**scope, "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
    try:
        await app(request, messages.get, send)
    except ValueError as error:  # JSON cannot represent a log-probability that is NaN
        return 500, str(error).encode()
    return status, content


def is_local(scope: Scope) -> bool:
    """Return whether the client is on this machine: its address is loopback or the server's own."""
    client = (scope.get("client") or [None])[0]
    server = (scope.get("server") or [None])[0]
    return client is not None and (client in _LOOPBACK or client == server)


def has_secret(headers: dict[str, bytes], secret: str) -> bool:
    """Return whether the request is authorized by the secret."""
    return hmac.compare_digest(headers.get("authorization", b""), f"Bearer {secret}".encode())


async def body_of(receive: Receive) -> bytes:
    """Read a request's body."""
    body, has_more = b"", True
    while has_more:
        message = await receive()
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
    return body


async def model_of(receive: Receive) -> tuple[str | None, Receive]:
    """Read the model from a completion's body, or None. Also returns a `receive` that gives vLLM the same body."""
    content = await body_of(receive)
    messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
    try:
        model = msgspec.json.decode(content, type=_Named).model
    except msgspec.DecodeError:
        model = None

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return model, replay


async def answer(send: Send, status: int, text: str) -> None:
    """Answer with a text; empty for 204."""
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(text.encode())).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [] if status == 204 else headers})
    await send({"type": "http.response.body", "body": text.encode()})
