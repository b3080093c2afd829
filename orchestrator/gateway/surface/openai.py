"""The gateway's OpenAI API: OpenAI clients get completions from the run's nodes.

A client gets the newest wanted policy or the one that it names; a response header names it. A stream continues
over a handover; text that was sent stays valid and is not repeated. A request that names a session is a turn of it
(`orchestrator.gateway.surface.sessions`).

vLLM's parsers need a whole answer, so a chat with tools, or of a reasoning model, is streamed as one event.
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

from grpo_orch.orchestrator.gateway.job import CannotContinue, Finished, Job, QueueFull, RequestRefused
from grpo_orch.orchestrator.gateway.routing.dispatch import Completer, Ledger
from grpo_orch.orchestrator.gateway.routing.members import Members
from grpo_orch.orchestrator.gateway.surface import admission, openai_request
from grpo_orch.orchestrator.gateway.surface.admission import ApiError
from grpo_orch.orchestrator.gateway.surface.chat import Answer, Translator
from grpo_orch.orchestrator.gateway.surface.openai_request import Chat, ClientRequest
from grpo_orch.orchestrator.gateway.surface.sessions import Sessions
from grpo_orch.policies.serving.sessions import HEADER_REQUEST, HEADER_SESSION, SESSIONS
from grpo_orch.policies.serving.wire import CHAT, COMPLETIONS, HEADER_POLICY, MODEL

# A request without progress for this long fails; OpenAI's clients have the same default timeout.
SILENCE_TIMEOUT_S = 600.0
MODELS = "/v1/models"
DIVERGED = (
    "the node of this stream was lost, another node generates different tokens, and these parameters do not allow "
    "continuing from the middle; retry the request, or set VLLM_BATCH_INVARIANT=1 on the nodes to prevent this"
)
_encode = msgspec.json.Encoder().encode


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
            web.post(COMPLETIONS, self._completions),
            web.post(CHAT, self._chat),
            web.get(f"{SESSIONS}/{{session}}{MODELS}", self._models),
            web.post(f"{SESSIONS}/{{session}}{CHAT}", self._chat),
        ]

    async def _models(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._model]})

    async def _get_model(self, request: web.Request) -> web.Response:
        if request.match_info["model"] != MODEL:
            raise ApiError(404, f"the only model is `{MODEL}`", "model", "model_not_found")
        return _json(self._model)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await admission.read(request, admission.OPENAI_SIZE_MAX)
        policy = self._policy(request)
        return await self._answer(request, openai_request.read_completion(body, policy), policy)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        chat = openai_request.read_chat(await admission.read(request, admission.OPENAI_SIZE_MAX))
        in_path = request.match_info.get("session")
        if (session := in_path or request.headers.get(HEADER_SESSION)) is not None:
            admission.name_of(HEADER_SESSION, session)
            openai_request.check_turn(chat)
            if in_path is None:
                self._sessions.open_if_new(session, request.headers.get(HEADER_POLICY))
            return await self._turn(request, chat, session)
        policy = self._policy(request)
        try:
            async with asyncio.timeout(SILENCE_TIMEOUT_S):
                prompt = await self._translator.prompt(chat)
        except TimeoutError:
            raise ApiError(504, f"no node rendered the messages within {SILENCE_TIMEOUT_S:g} s") from None
        sampling = {**chat.sampling, **prompt.sampling, "max_tokens": prompt.max_tokens}
        client_request = openai_request.from_chat(chat, prompt.token_ids, sampling, policy)
        return await self._answer(request, client_request, policy, is_parsed=prompt.is_parsed)

    async def _turn(self, request: web.Request, chat: Chat, session: str) -> web.StreamResponse:
        header = request.headers.get(HEADER_REQUEST)
        request_name = "" if header is None else admission.name_of(HEADER_REQUEST, header)
        job, finished, answer = await self._sessions.request(session, chat, request_name)
        client_request = openai_request.from_turn(chat, job)
        answer_format = AnswerFormat(client_request, job.policy)
        headers = {HEADER_POLICY: job.policy, HEADER_SESSION: session}
        if client_request.stream:
            return await _stream_whole(request, answer_format, [finished], [answer], headers)
        return _json(answer_format.document([finished], [answer]), headers)

    async def _answer(
        self, request: web.Request, client_request: ClientRequest, policy: str, *, is_parsed: bool = False
    ) -> web.StreamResponse:
        """Complete and answer a request. `is_parsed`: the text must be parsed to get a message."""
        chat, jobs = client_request.chat, client_request.jobs
        for job in jobs:
            job.recovery = self._members.recovery
        answer_format, headers = AnswerFormat(client_request, policy), {HEADER_POLICY: policy}
        async with _Run(jobs, self._completer, self._ledger) as run:
            await run.until_news()  # an error before the first token gets an HTTP status
            if client_request.stream and not is_parsed:
                return await _stream(request, answer_format, run, headers)
            while not run.is_over:
                await run.until_news()
            finished, answers = run.completions(), list[Answer]()
            if is_parsed and chat is not None:
                prompt = list(jobs[0].prompt_token_ids or ())
                answers = [await self._translator.answer(chat, prompt, completion) for completion in finished]
            run.is_delivered = True
            if client_request.stream:
                return await _stream_whole(request, answer_format, finished, answers, headers)
            return _json(answer_format.document(finished, answers), headers)

    def _policy(self, request: web.Request) -> str:
        header = request.headers.get(HEADER_POLICY)
        if header is not None:
            return admission.name_of(HEADER_POLICY, header)
        if self._members.wanted is None:
            raise ApiError(503, f"no policy is available yet; name one in {HEADER_POLICY}, or retry later")
        return self._members.wanted.label


class _Run:
    """A request's running jobs. Leaving the block cancels them and counts tokens as delivered or discarded."""

    def __init__(self, jobs: list[Job], completer: Completer, ledger: Ledger) -> None:
        self._jobs = jobs
        self._completer = completer
        self._ledger = ledger
        self._tasks: list[asyncio.Task[Finished]] = []
        self._news = asyncio.Event()
        self.is_delivered = False  # the client was sent everything

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
        if self.is_delivered:
            self._ledger.delivered += tokens
        else:
            self._ledger.discarded += tokens

    @property
    def is_over(self) -> bool:
        """Whether every job is finished."""
        return all(task.done() for task in self._tasks)

    def completion(self, index: int) -> Finished | None:
        """Return the completion of the job at that index, or None while it is unfinished."""
        return self._tasks[index].result() if self._tasks[index].done() else None

    def completions(self) -> list[Finished]:
        """Return all completions."""
        return [task.result() for task in self._tasks]

    async def until_news(self) -> None:
        """Wait for progress of any job. Raises ApiError if one of them has failed, or none made progress."""
        try:
            async with asyncio.timeout(SILENCE_TIMEOUT_S):
                await self._news.wait()
        except TimeoutError:
            failure = next((f"; last failure: {job.last_failure}" for job in self._jobs if job.last_failure), "")
            policy = self._jobs[0].policy
            message = f"no token of policy {policy} arrived within {SILENCE_TIMEOUT_S:g} s{failure}"
            raise ApiError(504, message) from None
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


async def _stream_whole(
    request: web.Request,
    answer_format: AnswerFormat,
    finished: Sequence[Finished],
    answers: Sequence[Answer],
    headers: dict[str, str],
) -> web.StreamResponse:
    """Stream each finished completion as one event."""
    response = await _events(request, headers)
    completions = zip(count(), finished, answers, strict=False)
    chunks = [answer_format.whole_chunk(index, completion, answer) for index, completion, answer in completions]
    if answer_format.request.include_usage:
        chunks.append(answer_format.usage_chunk())
    await response.write(b"".join(map(_event, chunks)) + b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _stream(
    request: web.Request, answer_format: AnswerFormat, run: _Run, headers: dict[str, str]
) -> web.StreamResponse:
    """Stream the tokens of all jobs as they arrive. An error becomes the last event."""
    response = await _events(request, headers)
    states = [StreamState() for _ in answer_format.request.jobs]
    unfinished = set(range(len(states)))
    try:
        while unfinished:
            chunks = []
            for index in sorted(unfinished):
                completion = run.completion(index)
                chunk = answer_format.chunk(index, states[index], completion)
                if chunk is not None:
                    chunks.append(_event(chunk))
                if completion is not None:
                    unfinished.discard(index)
            if chunks:
                await response.write(b"".join(chunks))
            if unfinished:
                await run.until_news()
    except ApiError as error:
        await response.write(_event(error_document(error)))
    else:
        run.is_delivered = True
        if answer_format.request.include_usage:
            await response.write(_event(answer_format.usage_chunk()))
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def error_document(error: ApiError) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + _encode(document) + b"\n\n"


def _json(document: dict[str, Any], headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=_encode(document), content_type="application/json", headers=headers)


@dataclass(slots=True)
class StreamState:
    """How much of a job has been sent to the client."""

    tokens: int = 0
    text: str = ""
    has_started: bool = False


class AnswerFormat:
    """Formats whole answers and stream chunks as the endpoint's clients expect them.

    Args:
        request: the client's request.
        policy: the label of the version that makes the answer.
    """

    def __init__(self, request: ClientRequest, policy: str) -> None:
        self.request = request
        self._head = {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": MODEL,
            "system_fingerprint": policy,
        }

    def document(self, finished: Sequence[Finished], answers: Sequence[Answer] = ()) -> dict[str, Any]:
        """Return the answer to a request that does not stream; `answers` are the parsed texts, if any."""
        request = self.request
        kind = "chat.completion" if request.chat else "text_completion"
        parsed = [*answers, *[None] * (len(finished) - len(answers))]
        completions = zip(count(), finished, parsed, strict=False)
        choices = [self._whole_choice(index, completion, answer) for index, completion, answer in completions]
        document = {**self._head, "object": kind, "choices": choices, "usage": self.usage()}
        if request.chat and request.include_token_ids:
            document["prompt_token_ids"] = list(request.jobs[0].prompt_token_ids or ())
        return document

    def whole_chunk(self, index: int, finished: Finished, answer: Answer) -> dict[str, Any]:
        """Return a whole choice as one event."""
        delta = dict(answer.message)
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": position, **call} for position, call in enumerate(calls)]
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._all_logprobs(index, answer),
            "finish_reason": answer.finish_reason,
            "stop_reason": finished.stop_reason,
        }
        if self.request.include_token_ids:
            choice["token_ids"] = finished.token_ids
            choice["prompt_token_ids"] = list(self.request.jobs[index].prompt_token_ids or ())
        return self._chunk([choice])

    def chunk(self, index: int, state: StreamState, completion: Finished | None) -> dict[str, Any] | None:
        """Return the new output of the job at that index, or None; `completion` once the job is finished."""
        request = self.request
        job = request.jobs[index]
        if job.is_catching_up:
            return None
        # An incomplete character is held back, since another node could not continue from the middle of it.
        start, end = state.tokens, job.whole_character_tokens() if completion is None else len(job.token_ids)
        text = job.text[len(state.text) :]
        has_new_tokens = end > start and (request.has_logprobs or request.include_token_ids)
        if not (text or completion is not None or has_new_tokens):
            return None
        choice: dict[str, Any] = {"index": index, "logprobs": self._logprobs(job, start, end)}
        if request.chat:
            role = {} if state.has_started else {"role": "assistant"}
            choice["delta"] = {**role, "content": text}
        else:
            choice["text"] = text
        choice["finish_reason"] = None if completion is None else completion.finish_reason
        if completion is not None:
            choice["stop_reason"] = completion.stop_reason
        if request.include_token_ids:
            choice["token_ids"] = job.token_ids[start:end]
            if not state.has_started:
                choice["prompt_token_ids"] = job.prompt_token_ids
        state.tokens = job.streamed_tokens = max(start, end)
        state.text, state.has_started = state.text + text, True
        return self._chunk([choice])

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream whose client requested usage."""
        return {**self._chunk([]), "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Return token counts; each prompt counts once, as in vLLM."""
        jobs = self.request.jobs
        prompt = sum(len(job.prompt_token_ids or ()) for job in jobs[:: self.request.n])
        completion = sum(len(job.token_ids) for job in jobs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.request.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _whole_choice(self, index: int, completion: Finished, answer: Answer | None) -> dict[str, Any]:
        request = self.request
        choice: dict[str, Any] = {"index": index}
        if answer is not None:
            choice["message"] = answer.message
        elif request.chat:
            choice["message"] = {"role": "assistant", "content": completion.text}
        else:
            choice["text"] = completion.text
        choice["logprobs"] = self._all_logprobs(index, answer)
        choice["finish_reason"] = completion.finish_reason if answer is None else answer.finish_reason
        choice["stop_reason"] = completion.stop_reason
        if request.include_token_ids:
            choice["token_ids"] = completion.token_ids
            if not request.chat:
                choice["prompt_token_ids"] = completion.prompt_token_ids
        return choice

    def _all_logprobs(self, index: int, answer: Answer | None) -> dict[str, Any] | None:
        """Return a whole choice's log-probabilities; those of a session's turn are in the parsed answer."""
        job = self.request.jobs[index]
        if answer is not None and not job.keep_text:
            return answer.logprobs if self.request.has_logprobs else None
        return self._logprobs(job, 0, len(job.token_ids))

    def _logprobs(self, job: Job, start: int, end: int) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens `[start:end]`, in the endpoint's format."""
        if not self.request.has_logprobs:
            return None
        tokens, logprobs, top = job.tokens[start:end], job.logprobs[start:end], job.top_logprobs[start:end]
        if self.request.chat:
            alternatives, limit = top or [{} for _ in tokens], self.request.chat.parameters.top_logprobs or 0
            content = [
                {
                    **_chat_logprob(token, value),
                    "top_logprobs": [_chat_logprob(*other) for other in others.items()][:limit],
                }
                for token, value, others in zip(tokens, logprobs, alternatives, strict=True)
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
