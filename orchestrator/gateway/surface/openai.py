"""The gateway as an OpenAI server: any OpenAI client gets its completions from the run's own nodes.

A client gets the newest wanted policy, or the one that it names; the answer says which. A stream goes on over a
hand-over: what the client was told stays true, and is not told twice. A request that names a session is a turn of
it (`orchestrator.gateway.surface.sessions`).

vLLM's parsers look at a whole answer. So a stream of a chat with tools, or of a model that reasons, is one event.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from types import TracebackType
from typing import Any

import msgspec
from aiohttp import hdrs, web

from orchestrator.gateway.job import CannotContinue, Finished, Job, QueueFull, RequestRefused
from orchestrator.gateway.routing.dispatch import Completer, Ledger
from orchestrator.gateway.routing.members import Members
from orchestrator.gateway.surface import admission, openai_request
from orchestrator.gateway.surface.admission import ApiError
from orchestrator.gateway.surface.chat import Answer, Translator
from orchestrator.gateway.surface.openai_request import Chat, ClientRequest
from orchestrator.gateway.surface.sessions import Sessions
from policies.serving.sessions import HEADER_REQUEST, HEADER_SESSION, SESSIONS
from policies.serving.wire import CHAT, COMPLETIONS, HEADER_POLICY, MODEL

# For so long nothing may come of a request, for want of a node or otherwise; OpenAI's clients wait as long.
SILENCE_TIMEOUT_S = 600.0
MODELS = "/v1/models"
DIVERGED = (
    "the node that made this stream was lost, another one computes other last bits and so other tokens, and "
    "with these parameters a stream cannot go on from its middle: ask again; with VLLM_BATCH_INVARIANT=1 on the "
    "nodes it does not happen"
)
_encode = msgspec.json.Encoder().encode


class OpenAI:
    """The handlers."""

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
            web.get(MODELS + "/{model}", self._one_model),
            web.post(COMPLETIONS, self._completions),
            web.post(CHAT, self._chat),
            web.get(f"{SESSIONS}/{{session}}{MODELS}", self._models),
            web.post(f"{SESSIONS}/{{session}}{CHAT}", self._chat),
        ]

    async def _models(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._model]})

    async def _one_model(self, request: web.Request) -> web.Response:
        if request.match_info["model"] != MODEL:
            raise ApiError(404, f"there is one model, `{MODEL}`", "model", "model_not_found")
        return _json(self._model)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await admission.read(request, admission.OPENAI_SIZE_MAX)
        policy = self._policy(request)
        return await self._answer(request, openai_request.read_completion(body, policy), policy)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        chat = openai_request.read_chat(await admission.read(request, admission.OPENAI_SIZE_MAX))
        opened, named = request.match_info.get("session"), request.headers.get(HEADER_SESSION)
        if (session := opened or named) is not None:
            admission.name_of(HEADER_SESSION, session)
            openai_request.check_turn(chat)
            if opened is None:
                self._sessions.open_if_new(session, request.headers.get(HEADER_POLICY))
            return await self._turn(request, chat, session)
        policy = self._policy(request)
        try:
            async with asyncio.timeout(SILENCE_TIMEOUT_S):
                prompt = await self._translator.prompt(chat)
        except TimeoutError:
            raise ApiError(
                504, f"no node was there for {SILENCE_TIMEOUT_S:g} s that could read the messages"
            ) from None
        sampling = {**chat.sampling, **prompt.sampling, "max_tokens": prompt.max_tokens}
        asked = openai_request.from_chat(chat, prompt.token_ids, sampling, policy)
        return await self._answer(request, asked, policy, is_parsed=prompt.is_parsed)

    async def _turn(self, request: web.Request, chat: Chat, session: str) -> web.StreamResponse:
        name = request.headers.get(HEADER_REQUEST)
        named = "" if name is None else admission.name_of(HEADER_REQUEST, name)
        job, finished, answer = await self._sessions.ask(session, chat, named)
        asked = openai_request.from_turn(chat, job)
        form = AnswerFormat(asked, job.policy)
        headers = {HEADER_POLICY: job.policy, HEADER_SESSION: session}
        if asked.stream:
            return await _stream_at_once(request, form, [finished], [answer], headers)
        return _json(form.whole([finished], [answer]), headers)

    async def _answer(
        self, request: web.Request, asked: ClientRequest, policy: str, *, is_parsed: bool = False
    ) -> web.StreamResponse:
        """`is_parsed`: whether its text has to be parsed before it is a message."""
        for job in asked.jobs:
            job.recovery = self._members.recovery
        form, headers = AnswerFormat(asked, policy), {HEADER_POLICY: policy}
        async with _Run(asked.jobs, self._completer, self._ledger) as run:
            await run.until_news()  # a refusal before the first word is an ordinary error
            if asked.stream and not is_parsed:
                return await _stream(request, asked, form, run, headers)
            while not run.over:
                await run.until_news()
            finished, answers = run.answers(), list[Answer]()
            if is_parsed and asked.chat is not None:
                prompt = list(asked.jobs[0].prompt_token_ids or ())
                answers = [await self._translator.answer(asked.chat, prompt, one) for one in finished]
            run.delivered = True
            if asked.stream:
                return await _stream_at_once(request, form, finished, answers, headers)
            return _json(form.whole(finished, answers), headers)

    def _policy(self, request: web.Request) -> str:
        named = request.headers.get(HEADER_POLICY)
        if named is not None:
            return admission.name_of(HEADER_POLICY, named)
        if self._members.wanted is None:
            raise ApiError(503, f"no policy is wanted yet: name one in {HEADER_POLICY}, or ask again later")
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
            job.on_progress = self._news.set
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
        """Return when something has come of any job. Raises ApiError where one of them cannot be done."""
        try:
            async with asyncio.timeout(SILENCE_TIMEOUT_S):
                await self._news.wait()
        except TimeoutError:
            last = next((f"; a failure was {job.last_failure}" for job in self._jobs if job.last_failure), "")
            policy = self._jobs[0].policy
            raise ApiError(504, f"nothing came of policy {policy} for {SILENCE_TIMEOUT_S:g} s{last}") from None
        self._news.clear()
        for task in self._tasks:
            if task.done():
                _check(task)


def _check(task: asyncio.Task[Finished]) -> None:
    try:
        task.result()
    except RequestRefused as error:
        raise ApiError(error.status, str(error)) from error
    except QueueFull as error:
        raise ApiError(503, str(error)) from error
    except CannotContinue as error:
        raise ApiError(503, DIVERGED, code="stream_diverged") from error


async def _events(request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={hdrs.CONTENT_TYPE: "text/event-stream", hdrs.CACHE_CONTROL: "no-cache", **headers}
    )
    await response.prepare(request)
    return response


async def _stream_at_once(
    request: web.Request,
    form: AnswerFormat,
    finished: Sequence[Finished],
    answers: Sequence[Answer],
    headers: dict[str, str],
) -> web.StreamResponse:
    response = await _events(request, headers)
    chunks = [form.whole_chunk(*one) for one in zip(count(), finished, answers, strict=False)]
    if form.asked.usage:
        chunks.append(form.usage_chunk())
    await response.write(b"".join(map(_event, chunks)) + b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _stream(
    request: web.Request, asked: ClientRequest, form: AnswerFormat, run: _Run, headers: dict[str, str]
) -> web.StreamResponse:
    response = await _events(request, headers)
    told = [StreamState() for _ in asked.jobs]
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
    except ApiError as error:
        await response.write(_event(error_document(error)))
    else:
        run.delivered = True
        if asked.usage:
            await response.write(_event(form.usage_chunk()))
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def error_document(error: ApiError) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + _encode(document) + b"\n\n"


def _json(document: dict[str, Any], headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=_encode(document), content_type="application/json", headers=headers)


# What an OpenAI client is told: whole documents, and stream chunks as far as the jobs are.


@dataclass(slots=True)
class StreamState:
    """How much of a job the client was told already."""

    tokens: int = 0
    text: str = ""
    started: bool = False


class AnswerFormat:
    """Answers in the form of the endpoint that was asked.

    Args:
        asked: the request.
        policy: the label of the version that makes all of it.
    """

    def __init__(self, asked: ClientRequest, policy: str) -> None:
        self.asked = asked
        self._head = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": MODEL,
            "system_fingerprint": policy,
        }

    def whole(self, finished: Sequence[Finished], answers: Sequence[Answer] = ()) -> dict[str, Any]:
        """The answer to a request that does not stream; `answers`: what the choices' texts were parsed to."""
        asked = self.asked
        kind = "chat.completion" if asked.chat else "text_completion"
        parsed = [*answers, *[None] * (len(finished) - len(answers))]
        choices = [self._whole_choice(i, *one) for i, one in enumerate(zip(finished, parsed, strict=True))]
        document = {**self._head, "object": kind, "choices": choices, "usage": self.usage()}
        if asked.chat and asked.token_ids:
            document["prompt_token_ids"] = list(asked.jobs[0].prompt_token_ids or ())
        return document

    def whole_chunk(self, index: int, finished: Finished, answer: Answer) -> dict[str, Any]:
        """All of a choice as one event."""
        delta = dict(answer.message)
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._all_logprobs(index, answer),
            "finish_reason": answer.finish_reason,
            "stop_reason": finished.stop_reason,
        }
        if self.asked.token_ids:
            choice["token_ids"] = finished.token_ids
            choice["prompt_token_ids"] = list(self.asked.jobs[index].prompt_token_ids or ())
        return self._chunk([choice])

    def chunk(self, index: int, told: StreamState, answer: Finished | None) -> dict[str, Any] | None:
        """What is new of the job at that index, or None; `answer`: the completion, once it is finished."""
        asked = self.asked
        job = asked.jobs[index]
        if job.is_catching_up:
            return None
        # Half a character waits for its other half: another node could not go on from between them.
        start, end = told.tokens, job.whole_character_tokens() if answer is None else len(job.token_ids)
        text = job.text[len(told.text) :]
        fresh = text or answer is not None or (end > start and (asked.logprobs or asked.token_ids))
        if not fresh:
            return None
        choice: dict[str, Any] = {"index": index, "logprobs": self._logprobs(job, start, end)}
        if asked.chat:
            role = {} if told.started else {"role": "assistant"}
            choice["delta"] = {**role, "content": text}
        else:
            choice["text"] = text
        choice["finish_reason"] = None if answer is None else answer.finish_reason
        if answer is not None:
            choice["stop_reason"] = answer.stop_reason
        if asked.token_ids:
            choice["token_ids"] = job.token_ids[start:end]
            if not told.started:
                choice["prompt_token_ids"] = job.prompt_token_ids
        told.tokens = job.streamed_tokens = max(start, end)
        told.text, told.started = told.text + text, True
        return self._chunk([choice])

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream whose client asked for its usage."""
        return {**self._chunk([]), "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Tokens, each prompt counted once, as vLLM does."""
        jobs = self.asked.jobs
        prompt = sum(len(job.prompt_token_ids or ()) for job in jobs[:: self.asked.n])
        completion = sum(len(job.token_ids) for job in jobs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.asked.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _whole_choice(self, index: int, answer: Finished, parsed: Answer | None) -> dict[str, Any]:
        asked = self.asked
        choice: dict[str, Any] = {"index": index}
        if parsed is not None:
            choice["message"] = parsed.message
        elif asked.chat:
            choice["message"] = {"role": "assistant", "content": answer.text}
        else:
            choice["text"] = answer.text
        choice["logprobs"] = self._all_logprobs(index, parsed)
        choice["finish_reason"] = answer.finish_reason if parsed is None else parsed.finish_reason
        choice["stop_reason"] = answer.stop_reason
        if asked.token_ids:
            choice["token_ids"] = answer.token_ids
            if not asked.chat:
                choice["prompt_token_ids"] = answer.prompt_token_ids
        return choice

    def _all_logprobs(self, index: int, parsed: Answer | None) -> dict[str, Any] | None:
        """Those of a whole choice. A turn of a session has no text but what it was parsed to."""
        job = self.asked.jobs[index]
        if parsed is not None and not job.keep_text:
            return parsed.logprobs if self.asked.logprobs else None
        return self._logprobs(job, 0, len(job.token_ids))

    def _logprobs(self, job: Job, start: int, end: int) -> dict[str, Any] | None:
        """Those of the tokens `[start:end]`, in the endpoint's form."""
        if not self.asked.logprobs:
            return None
        tokens, logprobs, top = job.tokens[start:end], job.logprobs[start:end], job.top_logprobs[start:end]
        if self.asked.chat:
            likeliest, most = top or [{} for _ in tokens], self.asked.chat.parameters.top_logprobs or 0
            content = [
                {
                    **_chat_logprob(token, value),
                    "top_logprobs": [_chat_logprob(*one) for one in others.items()][:most],
                }
                for token, value, others in zip(tokens, logprobs, likeliest, strict=True)
            ]
            return {"content": content}
        before = sum(map(len, job.tokens[:start]))
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": top,
            "text_offset": list(accumulate(map(len, tokens), initial=before))[:-1],
        }


def _chat_logprob(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
