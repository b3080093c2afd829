"""The gateway as an OpenAI server: any OpenAI client gets its completions from the run's own nodes.

A client gets the newest wanted policy, or the one that it names; the answer says which. A stream goes on over a
hand-over: what the client was told stays true, and is not told twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec
from aiohttp import hdrs, web

from orchestrator.gateway.job import CannotGoOn, Finished, Job, QueueFull, RequestRefused
from orchestrator.gateway.routing.dispatch import Completer, Ledger
from orchestrator.gateway.routing.members import Members
from orchestrator.gateway.surface import admission, openai_request
from orchestrator.gateway.surface.admission import Refused
from orchestrator.gateway.surface.openai_answer import AnswerFormat, Told
from orchestrator.gateway.surface.openai_request import Asked
from policies.serving.wire import CHAT, COMPLETIONS, HEADER_POLICY, MODEL

# For so long nothing may come of a request, for want of a node or otherwise; OpenAI's clients wait as long.
SILENCE_S = 600.0
MODELS = "/v1/models"
DIVERGED = (
    "the node that made this stream was lost, another one computes other last bits and so other tokens, and "
    "with these parameters a stream cannot go on from its middle: ask again; with VLLM_BATCH_INVARIANT=1 on the "
    "nodes it does not happen"
)
_encode = msgspec.json.Encoder().encode


class OpenAI:
    """The handlers."""

    def __init__(self, members: Members, completer: Completer, ledger: Ledger, created_s: int) -> None:
        self._members = members
        self._completer = completer
        self._ledger = ledger
        self._model = {"id": MODEL, "object": "model", "created": created_s, "owned_by": "the run"}

    def routes(self) -> list[web.RouteDef]:
        """The paths and their handlers."""
        return [
            web.get(MODELS, self._models),
            web.get(MODELS + "/{model}", self._one_model),
            web.post(COMPLETIONS, self._completions),
            web.post(CHAT, self._chat),
        ]

    async def _models(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._model]})

    async def _one_model(self, request: web.Request) -> web.Response:
        if request.match_info["model"] != MODEL:
            raise Refused(404, f"there is one model, `{MODEL}`", "model", "model_not_found")
        return _json(self._model)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._ask(request, openai_request.read_completion)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._ask(request, openai_request.read_chat)

    async def _ask(self, request: web.Request, read: Callable[[bytearray, str], Asked]) -> web.StreamResponse:
        body = await admission.read(request, admission.OPENAI_SIZE_MAX)
        policy = self._policy(request)
        asked = read(body, policy)
        for job in asked.jobs:
            job.recovery = self._members.recovery
        form, headers = AnswerFormat(asked, policy), {HEADER_POLICY: policy}
        async with _Run(asked.jobs, self._completer, self._ledger) as run:
            await run.until_news()  # a refusal before the first word is an ordinary error
            if asked.stream:
                return await _stream(request, asked, form, run, headers)
            while not run.over:
                await run.until_news()
            run.delivered = True
            return _json(form.whole(run.answers()), headers)

    def _policy(self, request: web.Request) -> str:
        named = request.headers.get(HEADER_POLICY)
        if named is not None:
            return admission.name_of(HEADER_POLICY, named)
        if self._members.wanted is None:
            raise Refused(503, f"no policy is wanted yet: name one in {HEADER_POLICY}, or ask again later")
        return self._members.wanted.label


class _Run:
    """A request's jobs at work. Leaving the block ends them and counts their tokens as delivered or discarded."""

    def __init__(self, jobs: list[Job], completer: Completer, ledger: Ledger) -> None:
        self._jobs = jobs
        self._completer = completer
        self._ledger = ledger
        self._tasks: list[asyncio.Task[Finished]] = []
        self._news = asyncio.Event()
        self.delivered = False  # the client was told everything

    async def __aenter__(self) -> _Run:
        for job in self._jobs:
            job.arrived = self._news.set
            task = asyncio.ensure_future(self._completer.complete(job))
            task.add_done_callback(lambda _: self._news.set())
            self._tasks.append(task)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        tokens = sum(len(job.token_ids) for job in self._jobs)
        if self.delivered:
            self._ledger.delivered += tokens
        else:
            self._ledger.discarded += tokens

    @property
    def over(self) -> bool:
        """Whether every job is finished."""
        return all(task.done() for task in self._tasks)

    def answer(self, index: int) -> Finished | None:
        """The job at that index, once it is finished."""
        return self._tasks[index].result() if self._tasks[index].done() else None

    def answers(self) -> list[Finished]:
        """All of them."""
        return [task.result() for task in self._tasks]

    async def until_news(self) -> None:
        """Return when something has come of any job. Raises Refused where one of them cannot be done."""
        try:
            async with asyncio.timeout(SILENCE_S):
                await self._news.wait()
        except TimeoutError:
            last = next((f"; a failure was {job.last_failure}" for job in self._jobs if job.last_failure), "")
            policy = self._jobs[0].policy
            raise Refused(504, f"nothing came of policy {policy} for {SILENCE_S:g} s{last}") from None
        self._news.clear()
        for task in self._tasks:
            if task.done():
                _check(task)


def _check(task: asyncio.Task[Finished]) -> None:
    try:
        task.result()
    except RequestRefused as error:
        raise Refused(error.status, str(error)) from error
    except QueueFull as error:
        raise Refused(503, str(error)) from error
    except CannotGoOn as error:
        raise Refused(503, DIVERGED, code="stream_diverged") from error


async def _stream(
    request: web.Request, asked: Asked, form: AnswerFormat, run: _Run, headers: dict[str, str]
) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={hdrs.CONTENT_TYPE: "text/event-stream", hdrs.CACHE_CONTROL: "no-cache", **headers}
    )
    await response.prepare(request)
    told = [Told() for _ in asked.jobs]
    left = set(range(len(told)))
    try:
        while left:
            chunks = []
            for index in sorted(left):
                answer = run.answer(index)
                chunk = form.chunk(index, told[index], answer)
                if chunk is not None:
                    chunks.append(_event(chunk))
                if answer is not None:
                    left.discard(index)
            if chunks:
                await response.write(b"".join(chunks))
            if left:
                await run.until_news()
    except Refused as error:
        await response.write(_event(error_document(error)))
    else:
        run.delivered = True
        if asked.usage:
            await response.write(_event(form.usage_chunk()))
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def error_document(error: Refused) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + _encode(document) + b"\n\n"


def _json(document: dict[str, Any], headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=_encode(document), content_type="application/json", headers=headers)
