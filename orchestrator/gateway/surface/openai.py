"""The gateway's OpenAI API: OpenAI clients get answers to chats from the run's nodes.

A client gets the newest wanted policy or the one that it names; a response header names it. A request below a
session's path is a turn of it (`orchestrator.gateway.surface.sessions`).

A stream has one event for each choice, at the end: vLLM's parsers need a whole answer, and a request whose node is
lost may start over, which must not take back text that a client has.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import msgspec
from aiohttp import hdrs, web

from grpo_orch.orchestrator.gateway.job import Finished, Job
from grpo_orch.orchestrator.gateway.routing.dispatch import Completer, Ledger
from grpo_orch.orchestrator.gateway.routing.gateway_members import Members
from grpo_orch.orchestrator.gateway.surface import admission
from grpo_orch.orchestrator.gateway.surface.admission import ApiError
from grpo_orch.orchestrator.gateway.surface.chat import Answer, Chat, Translator, check_turn, jobs_of, read_chat
from grpo_orch.orchestrator.gateway.surface.sessions import Sessions
from grpo_orch.policies.serving.wire import (
    CHAT,
    HEADER_POLICY,
    HEADER_REQUEST,
    HEADER_SESSION,
    MODEL,
    SESSIONS,
)

# A request without progress for this long fails; OpenAI's clients have the same default timeout.
SILENCE_TIMEOUT_S = 600.0
MODELS = "/v1/models"
CHECK_S = 1.0
_encode = msgspec.json.Encoder().encode
T = TypeVar("T")


class OpenAI:
    """The handlers of the OpenAI API."""

    def __init__(
        self,
        members: Members,
        completer: Completer,
        ledger: Ledger,
        translator: Translator,
        sessions: Sessions,
        created_s: int,
    ) -> None:
        self._members = members
        self._completer = completer
        self._ledger = ledger
        self._translator = translator
        self._sessions = sessions
        self._model = {"id": MODEL, "object": "model", "created": created_s, "owned_by": "the run"}

    def routes(self) -> list[web.RouteDef]:
        """Return the paths and their handlers."""
        return [
            web.get(MODELS, self._models),
            web.get(MODELS + "/{model}", self._get_model),
            web.post(CHAT, self._chat),
            web.get(f"{SESSIONS}/{{session}}{MODELS}", self._models),
            web.post(f"{SESSIONS}/{{session}}{CHAT}", self._chat),
        ]

    async def _models(self, _: web.Request) -> web.Response:
        """List the only model, `policy`, which stands for every version."""
        return _json({"object": "list", "data": [self._model]})

    async def _get_model(self, request: web.Request) -> web.Response:
        """Return the model `policy`, or 404 for another name."""
        if request.match_info["model"] != MODEL:
            raise ApiError(404, f"the only model is `{MODEL}`", "model", "model_not_found")
        return _json(self._model)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat as OpenAI's API does; a turn of a session if the path or `X-Session-ID` names one."""
        chat = read_chat(await admission.read(request, admission.OPENAI_SIZE_MAX))
        session = request.match_info.get("session", request.headers.get(HEADER_SESSION))
        if session is not None:
            return await self._turn(request, chat, admission.name_of("session", session))
        policy = self._policy(request)
        prompt = await _within_limit(self._translator.prompt(chat))
        sampling = {**chat.sampling, **prompt.sampling, "max_tokens": prompt.max_tokens}
        return await self._answer(chat, jobs_of(chat, prompt.token_ids, sampling, policy))

    async def _turn(self, request: web.Request, chat: Chat, session: str) -> web.Response:
        check_turn(chat)
        header = request.headers.get(HEADER_REQUEST)
        request_name = "" if header is None else admission.name_of(HEADER_REQUEST, header)
        opening = admission.opening_of(request)
        finished, answer = await self._sessions.request(session, chat, request_name, opening)
        return _response(chat, [finished], [answer])

    async def _answer(self, chat: Chat, jobs: list[Job]) -> web.Response:
        """Complete and answer a chat."""
        is_delivered = False
        try:
            finished = await self._complete(jobs)
            answers = [await _within_limit(self._translator.answer(chat, completion)) for completion in finished]
            is_delivered = True
        finally:
            tokens = sum(len(job.token_ids) for job in jobs)
            self._ledger.delivered += tokens if is_delivered else 0
            self._ledger.discarded += 0 if is_delivered else tokens
        return _response(chat, finished, answers)

    async def _complete(self, jobs: list[Job]) -> list[Finished]:
        """Return all completions.

        Raises RequestRefused, QueueFull, and ApiError if none makes progress for too long.
        """
        for job in jobs:
            job.recovery = self._members.recovery
        tasks = [asyncio.ensure_future(self._completer.complete(job)) for job in jobs]
        now_s = asyncio.get_running_loop().time
        arrived, progress_at_s, running = 0, now_s(), set(tasks)
        try:
            while running:
                done, running = await asyncio.wait(
                    tasks, timeout=min(CHECK_S, SILENCE_TIMEOUT_S), return_when=asyncio.FIRST_EXCEPTION
                )
                for task in done:
                    task.result()
                if arrived != (tokens := sum(len(job.token_ids) for job in jobs)):
                    arrived, progress_at_s = tokens, now_s()
                elif running and now_s() - progress_at_s >= SILENCE_TIMEOUT_S:
                    failure = next((f"; last failure: {job.last_failure}" for job in jobs if job.last_failure), "")
                    message = (
                        f"no token of policy {jobs[0].policy} arrived within {SILENCE_TIMEOUT_S:g} s{failure}"
                    )
                    raise ApiError(504, message)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _policy(self, request: web.Request) -> str:
        header = request.headers.get(HEADER_POLICY)
        if header is not None:
            return admission.name_of(HEADER_POLICY, header)
        if self._members.wanted is None:
            raise ApiError(503, f"no policy is available yet; name one in {HEADER_POLICY}, or retry later")
        return self._members.wanted.label


async def _within_limit(translation: Awaitable[T]) -> T:
    """Return what a node renders or parses. Raises ApiError if none does for too long."""
    try:
        async with asyncio.timeout(SILENCE_TIMEOUT_S):
            return await translation
    except TimeoutError:
        raise ApiError(504, f"no node rendered the messages within {SILENCE_TIMEOUT_S:g} s") from None


def error_document(error: ApiError) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def _json(document: dict[str, Any], headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=_encode(document), content_type="application/json", headers=headers)


def _response(chat: Chat, finished: Sequence[Finished], answers: Sequence[Answer]) -> web.Response:
    """Return the answer to a chat: a choice for each completion, with its parsed answer."""
    parameters, job = chat.parameters, finished[0].job
    head = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": MODEL,
        "system_fingerprint": job.policy,
        "object": "chat.completion.chunk" if parameters.stream else "chat.completion",
    }
    pairs = enumerate(zip(finished, answers, strict=True))
    choices = [_choice(chat, index, completion, answer) for index, (completion, answer) in pairs]
    if not parameters.stream:
        document = {**head, "choices": choices, "usage": _usage(finished)}
        if parameters.return_token_ids:
            document["prompt_token_ids"] = list(job.prompt)
        return _json(document, {HEADER_POLICY: job.policy})
    events = [{**head, "choices": [choice]} for choice in choices]
    if parameters.stream_options is not None and parameters.stream_options.include_usage:
        events.append({**head, "choices": [], "usage": _usage(finished)})
    body = b"".join(b"data: " + _encode(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    headers = {hdrs.CACHE_CONTROL: "no-cache", HEADER_POLICY: job.policy}
    return web.Response(body=body, content_type="text/event-stream", headers=headers)


def _choice(chat: Chat, index: int, finished: Finished, answer: Answer) -> dict[str, Any]:
    parameters = chat.parameters
    choice: dict[str, Any] = {
        "index": index,
        **({"delta": _delta(answer.message)} if parameters.stream else {"message": answer.message}),
        "finish_reason": answer.finish_reason,
        "stop_reason": finished.stop_reason,
        "logprobs": answer.logprobs if parameters.logprobs else None,
    }
    if parameters.return_token_ids:
        choice["token_ids"] = finished.token_ids
        if parameters.stream:
            choice["prompt_token_ids"] = list(finished.job.prompt)
    return choice


def _delta(message: dict[str, Any]) -> dict[str, Any]:
    """Return a whole message as a stream's only change of it."""
    if calls := message.get("tool_calls"):
        return {**message, "tool_calls": [{"index": position, **call} for position, call in enumerate(calls)]}
    return message


def _usage(finished: Sequence[Finished]) -> dict[str, int]:
    """Return token counts; the prompt counts once, as in vLLM."""
    prompt = len(finished[0].job.prompt)
    completion = sum(len(choice.token_ids) for choice in finished)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
