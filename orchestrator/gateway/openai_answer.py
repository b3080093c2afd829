"""What an OpenAI client is told: documents and stream chunks, as far as a job has come."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from orchestrator.gateway.job import Finished, Job
from orchestrator.gateway.openai_request import Asked
from orchestrator.gateway.upstream import MODEL


class Diverged(Exception):
    """What a job has come to is not what the client was told of it before."""


@dataclass(slots=True)
class Told:
    """How much of a job the client was told already."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    started: bool = False
    _discarded: int = 0  # the job's, when it was last seen to agree

    def agrees(self, job: Job, finished: bool) -> bool:
        """Whether there may be news: a job that started over first grows to where it was. Raises Diverged."""
        if job.discarded == self._discarded:
            return True
        if len(job.token_ids) < len(self.token_ids) or len(job.text) < len(self.text):
            if finished:
                raise Diverged
            return False
        if job.token_ids[: len(self.token_ids)] != self.token_ids:
            raise Diverged
        self._discarded = job.discarded
        return True


class Voice:
    """Speaks as the endpoint that was asked.

    Args:
        asked: what for.
        policy: the label that makes all of it.
    """

    def __init__(self, asked: Asked, policy: str) -> None:
        self._asked = asked
        self._head = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": MODEL,
            "system_fingerprint": policy,
        }

    def whole(self, answers: Sequence[Finished]) -> dict[str, Any]:
        """The answer of one that does not stream."""
        asked = self._asked
        kind = "chat.completion" if asked.chat else "text_completion"
        pairs = enumerate(zip(asked.jobs, answers, strict=True))
        choices = [self._whole_choice(i, job, answer) for i, (job, answer) in pairs]
        document = {**self._head, "object": kind, "choices": choices, "usage": self.usage()}
        if asked.chat and asked.token_ids:
            document["prompt_token_ids"] = asked.jobs[0].prompt_token_ids
        return document

    def chunk(self, index: int, told: Told, answer: Finished | None) -> dict[str, Any] | None:
        """What is new of the job at that index, or None; `answer` once it is finished. Raises Diverged."""
        asked = self._asked
        job = asked.jobs[index]
        if not told.agrees(job, answer is not None):
            return None
        start, text = len(told.token_ids), job.text[len(told.text) :]
        fresh = text or answer is not None or (len(job.token_ids) > start and (asked.logprobs or asked.token_ids))
        if not fresh:
            return None
        choice: dict[str, Any] = {"index": index, "logprobs": self._logprobs(job, start)}
        if asked.chat:
            role = {} if told.started else {"role": "assistant"}
            choice["delta"] = {**role, "content": text}
        else:
            choice["text"] = text
        choice["finish_reason"] = None if answer is None else answer.finish_reason
        if answer is not None:
            choice["stop_reason"] = answer.stop_reason
        if asked.token_ids:
            choice["token_ids"] = job.token_ids[start:]
            if not told.started:
                choice["prompt_token_ids"] = job.prompt_token_ids
        told.token_ids += job.token_ids[start:]
        told.text, told.started = job.text, True
        return self._chunk([choice])

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream that is to end with its usage."""
        return {**self._chunk([]), "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Each prompt counted once, as vLLM does."""
        jobs = self._asked.jobs
        prompt = sum(len(job.prompt_token_ids or ()) for job in jobs[:: self._asked.n])
        completion = sum(len(job.token_ids) for job in jobs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._asked.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _whole_choice(self, index: int, job: Job, answer: Finished) -> dict[str, Any]:
        asked = self._asked
        choice: dict[str, Any] = {"index": index}
        if asked.chat:
            choice["message"] = {"role": "assistant", "content": answer.text}
        else:
            choice["text"] = answer.text
        choice["logprobs"] = self._logprobs(job, 0)
        choice["finish_reason"] = answer.finish_reason
        choice["stop_reason"] = answer.stop_reason
        if asked.token_ids:
            choice["token_ids"] = answer.token_ids
            if not asked.chat:
                choice["prompt_token_ids"] = answer.prompt_token_ids
        return choice

    def _logprobs(self, job: Job, start: int) -> dict[str, Any] | None:
        """Of the tokens from `start` on, in the endpoint's form."""
        if not self._asked.logprobs:
            return None
        tokens, logprobs, top = job.tokens[start:], job.logprobs[start:], job.top_logprobs[start:]
        if self._asked.chat:
            likeliest = top or [{} for _ in tokens]
            content = [
                {**_chat_logprob(token, value), "top_logprobs": [_chat_logprob(*one) for one in others.items()]}
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
