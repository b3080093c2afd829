"""Send one job to one member and read its events.

Tokens go into the job as they arrive, so that a lost connection loses none of them. Any failure of the node raises
NodeFailed, and the job moves to another member; vLLM's errors about the request itself raise RequestRefused.
Invalid responses never raise anything else.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from grpo_orch.orchestrator.gateway.job import Job, RequestRefused, WeightsRefused
from grpo_orch.orchestrator.gateway.nodes.connection import Connection
from grpo_orch.orchestrator.gateway.nodes.link import Attempt, End, HandoverReason, Link, NodeFailed
from grpo_orch.policies.serving import recovery
from grpo_orch.policies.serving.wire import COMPLETIONS, MODEL

# Parameters that the gateway sets, so a batch or session must not.
RESERVED = frozenset({"model", "prompt", "seed", "stream", "stream_options", "n", "logprobs", "return_token_ids"})
EVENT_SIZE_MAX = 16 * 1024 * 1024  # the first event of a text prompt has its token ids: a million are 8 MB
REFUSAL_SIZE_MAX = 2000  # of an error's text
# `list` encodes prompts of batches, which are arrays.
_encode = msgspec.json.Encoder(enc_hook=list).encode
_UNFINISHED = frozenset({"abort", "error"})
# vLLM's messages for a prompt that is too long, and for too many tokens (`renderers/params.py`).
_TOO_LONG = re.compile(r"(?:maximum context length is |max_tokens=\d+ cannot be greater than \w+=)(\d+)")
RETRYABLE = frozenset({401, 404, 408, 409, 425, 429})  # 4xx, but the node's fault or temporary

Token = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # so that no node's data causes an error later
C = TypeVar("C")


class _Error(msgspec.Struct, gc=False):
    """vLLM's error event, for a failure after it has answered 200."""

    message: str = ""
    code: int = 500


class _Logprobs(msgspec.Struct, gc=False):
    token_logprobs: list[float | None] = []


class _Choice(msgspec.Struct, gc=False):
    """What training needs of an event. It costs least to decode."""

    token_ids: list[Token] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _TextLogprobs(_Logprobs, gc=False):
    tokens: list[str] = []
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _TextChoice(_Choice, gc=False):
    text: str = ""
    logprobs: _TextLogprobs | None = None
    prompt_token_ids: list[Token] | None = None


class _Event(msgspec.Struct, Generic[C], gc=False):
    """One event of `/v1/completions`."""

    choices: list[C] = []
    error: _Error | None = None


_read = msgspec.json.Decoder(_Event[_Choice]).decode
_read_text = msgspec.json.Decoder(_Event[_TextChoice]).decode


class VllmAttempt(Attempt):
    """An attempt over a link.

    Args:
        job: gets the tokens as they arrive.
        link: the member.
        on_first_token: called when the first token arrives.
    """

    __slots__ = ("_connection", "_error_body", "_now", "_on_first_token", "_status", "_unparsed", "link")

    def __init__(self, job: Job, link: Link, on_first_token: Callable[[], None]) -> None:
        super().__init__(job)
        self.link, self._on_first_token = link, on_first_token
        self._now = asyncio.get_running_loop().time
        self._connection: Connection | None = None
        self._unparsed = bytearray()
        self._error_body = b""
        self._status = 0

    async def run(self) -> End:
        """Return how the completion ended. Raises NodeFailed, RequestRefused.

        An error or a cancellation closes the connection, which makes vLLM abort the request.
        """
        link = self.link
        if not link.running:
            link.last_event_s = self.sent_s
        link.running.add(self)
        try:
            await link.time_slices.take()
            if self._done.done():
                return self._done.result()
            self.sent_s = self.last_event_s = self._now()
            request = self._request()
            self._connection = self.link.pool.take() or await self._connect()
            if not self._done.done():
                self._connection.send(request, self)
            return await self._done
        finally:
            self.link.running.discard(self)
            if not self._done.done() or self._done.cancelled() or self._done.exception() is not None:
                self._done.cancel()
                if self._connection is not None:
                    self._connection.cancel(self)

    def head(self, status: int) -> None:
        self._status = status

    def body(self, data: bytes) -> None:
        if self._done.done():
            return
        if self._status != 200:
            self._error_body = (self._error_body + data)[:REFUSAL_SIZE_MAX]
        elif self._unparsed or not self._read_event(data):
            self._read_pieces(data)

    def _read_event(self, data: bytes) -> bool:
        """Read data that is one whole event, as nearly always. Returns False for anything else."""
        if not (data.startswith(b"data: ") and data.endswith(b"\n\n")):
            return False
        try:
            event = _read_text(data[6:]) if self.job.keep_text else _read(data[6:])
        except (msgspec.MsgspecError, ValueError, RecursionError):  # RecursionError: nested too deeply
            return False
        self._apply(event)
        return True

    def _read_pieces(self, data: bytes) -> None:
        """Read data that is part of an event, or several events."""
        searched = max(0, len(self._unparsed) - 1)
        self._unparsed += data
        if self._unparsed.find(b"\n\n", searched) < 0:
            if len(self._unparsed) > EVENT_SIZE_MAX:
                self._fail_broken(f"sent an event over {EVENT_SIZE_MAX >> 20} MiB")
            return
        *events_data, rest = bytes(self._unparsed).split(b"\n\n")
        self._unparsed = bytearray(rest)
        for event in events_data:
            if self._done.done():
                return
            if event.startswith(b"data: ") and event != b"data: [DONE]" and not self._read_event(event + b"\n\n"):
                self._fail_broken(f"sent an invalid event: {event[6:86]!r}")

    def end(self) -> None:
        if self._status != 200:
            self._refuse(self._status, f"answered {self._status}: {self._error_body.decode(errors='replace')}")
        elif not self._done.done():
            self._fail_broken(f"stream ended after {self.tokens} tokens without a finish reason")

    def lost(self, why: str) -> None:
        self.fail(NodeFailed(HandoverReason.LOST, why))

    def _request(self) -> list[bytes]:
        try:
            encoded = _encode(_body_of(self.job))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestRefused(f"the request cannot be encoded for a node: {error}") from error
        return [self.link.head("POST", COMPLETIONS, self.job.policy, len(encoded)), encoded]

    async def _connect(self) -> Connection:
        """Connect, unless this attempt ends first."""
        connecting = asyncio.ensure_future(self.link.pool.connect_throttled(self.link.silence_limits.connect_s))
        try:
            both: set[asyncio.Future[Any]] = {connecting, self._done}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self._done.done():
                self._done.result()  # raises: without a connection it can only have failed
            return await connecting
        except TimeoutError as error:
            raise NodeFailed(HandoverReason.LOST, "connecting timed out") from error
        except ConnectionRefusedError as error:
            raise NodeFailed(HandoverReason.CLOSED, "connection refused") from error
        except OSError as error:
            raise NodeFailed(
                HandoverReason.LOST, f"connecting failed: {str(error) or type(error).__name__}"
            ) from error
        finally:
            if not connecting.cancel() and self._done.done() and connecting.exception() is None:
                self.link.pool.keep(connecting.result())

    def _apply(self, event: _Event[_Choice] | _Event[_TextChoice]) -> None:
        if event.error is not None:
            self._refuse(event.error.code, f"reported {event.error.code}: {event.error.message}")
        elif event.choices:
            choice = event.choices[0]
            logprobs = [] if choice.logprobs is None else choice.logprobs.token_logprobs
            if not self._add_tokens(choice.token_ids or [], logprobs):
                return
            if isinstance(choice, _TextChoice):
                self._add_text(choice)
            if choice.finish_reason is not None:
                self._finish(choice.finish_reason, choice.stop_reason)

    def _add_text(self, choice: _TextChoice) -> None:
        job = self.job
        job.text += choice.text
        if job.prompt_token_ids is None:
            job.prompt_token_ids = choice.prompt_token_ids
        if choice.logprobs is not None:
            job.tokens += choice.logprobs.tokens
            job.top_logprobs += [
                {token: value for token, value in (alternatives or {}).items() if value is not None}
                for alternatives in choice.logprobs.top_logprobs or []
            ]

    def _add_tokens(self, token_ids: list[int], logprobs: list[float | None]) -> bool:
        """Add tokens to the job. Returns False if they are invalid, which ends the attempt."""
        if len(logprobs) != len(token_ids):
            self._fail_broken(f"sent {len(token_ids)} tokens with {len(logprobs)} log-probabilities")
            return False
        if None in logprobs:
            # vLLM writes NaN as null. Every node with these weights would send the same.
            message = "vLLM's log-probabilities are not numbers; the policy's weights may contain NaN"
            self.fail(WeightsRefused(message, 422))
            return False
        job, link, now_s = self.job, self.link, self._now()
        job.token_ids += token_ids
        job.logprobs += logprobs  # type: ignore[arg-type]  # checked above
        link.last_event_s = now_s
        link.received_tokens += len(token_ids)
        if self.first_token_at_s is not None:
            link.silence_limits.record_gap(now_s - self.last_event_s)
        elif token_ids:
            self.first_token_at_s = now_s
            if job.first_token_at_s is None:
                job.first_token_at_s = now_s
            link.newest_started_s = max(link.newest_started_s, self.sent_s)
            link.prompt_tokens += job.prompt_tokens + self._tokens_before
            link.silence_limits.record_first_token(now_s - self.sent_s, job.prompt_tokens)
            self._on_first_token()
        self.last_event_s = now_s
        if len(job.token_ids) > self.max_tokens:
            self._fail_broken(f"sent {len(job.token_ids)} tokens, more than the limit of {self.max_tokens}")
            return False
        return True

    def _finish(self, finish_reason: str, stop_reason: int | str | None) -> None:
        """End the attempt at an event with a finish reason, even if the connection breaks after it."""
        if finish_reason in _UNFINISHED:
            self.fail(NodeFailed(HandoverReason.REFUSED, f"stopped after {self.tokens} tokens: {finish_reason}"))
            return
        assert self._connection is not None
        self._connection.detach(self.last_event_s)
        self._done.set_result(End(finish_reason, stop_reason))

    def _refuse(self, status: int, answer: str) -> None:
        if 400 <= status < 500 and status not in RETRYABLE:
            limit = _TOO_LONG.search(answer)
            self.fail(RequestRefused(f"vLLM {answer}", status, None if limit is None else int(limit[1])))
        else:
            self.fail(NodeFailed(HandoverReason.REFUSED, answer[:200]))

    def _fail_broken(self, what: str) -> None:
        self.fail(NodeFailed(HandoverReason.BROKEN, what))


def _body_of(job: Job) -> dict[str, Any]:
    """Return vLLM's request body, for the whole completion or for the rest after the tokens that arrived."""
    fixed = {"model": MODEL, "stream": True, "n": 1, "return_token_ids": True}
    logprobs = job.body.get("logprobs") or 0
    if job.token_ids and job.prompt_token_ids is not None:
        prompt = [*job.prompt_token_ids, *job.token_ids]
        body = recovery.remaining_parameters(job.body, len(job.token_ids))
        return {**body, **fixed, "prompt": prompt, "seed": job.body.get("seed"), "logprobs": logprobs}
    return {**job.body, **fixed, "logprobs": logprobs}
