"""What an OpenAI client is told: whole documents, and stream chunks as far as the jobs are."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from orchestrator.gateway.job import Finished, Job
from orchestrator.gateway.surface.openai_request import Asked
from policies.serving.wire import MODEL


@dataclass(slots=True)
class Told:
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

    def __init__(self, asked: Asked, policy: str) -> None:
        self._asked = asked
        self._head = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": MODEL,
            "system_fingerprint": policy,
        }

    def whole(self, answers: Sequence[Finished]) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        asked = self._asked
        kind = "chat.completion" if asked.chat else "text_completion"
        pairs = enumerate(zip(asked.jobs, answers, strict=True))
        choices = [self._whole_choice(i, job, answer) for i, (job, answer) in pairs]
        document = {**self._head, "object": kind, "choices": choices, "usage": self.usage()}
        if asked.chat and asked.token_ids:
            document["prompt_token_ids"] = asked.jobs[0].prompt_token_ids
        return document

    def chunk(self, index: int, told: Told, answer: Finished | None) -> dict[str, Any] | None:
        """What is new of the job at that index, or None; `answer`: the completion, once it is finished."""
        asked = self._asked
        job = asked.jobs[index]
        if job.regrowing:
            return None
        # Half a character waits for its other half: another node could not go on from between them.
        start, end = told.tokens, job.whole() if answer is None else len(job.token_ids)
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
        told.tokens = job.told = max(start, end)
        told.text, told.started = told.text + text, True
        return self._chunk([choice])

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream whose client asked for its usage."""
        return {**self._chunk([]), "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Tokens, each prompt counted once, as vLLM does."""
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
        choice["logprobs"] = self._logprobs(job, 0, len(job.token_ids))
        choice["finish_reason"] = answer.finish_reason
        choice["stop_reason"] = answer.stop_reason
        if asked.token_ids:
            choice["token_ids"] = answer.token_ids
            if not asked.chat:
                choice["prompt_token_ids"] = answer.prompt_token_ids
        return choice

    def _logprobs(self, job: Job, start: int, end: int) -> dict[str, Any] | None:
        """Those of the tokens `[start:end]`, in the endpoint's form."""
        if not self._asked.logprobs:
            return None
        tokens, logprobs, top = job.tokens[start:end], job.logprobs[start:end], job.top_logprobs[start:end]
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
