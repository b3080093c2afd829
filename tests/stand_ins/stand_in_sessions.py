"""A gateway's sessions without a gateway: turns are sampled by a function, recorded, and repeated."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from checkpoint.store.codec import to_json
from policies.serving.sessions import LIMIT_CODE, LOST_CODE, SESSIONS, Branch, OpenSession, Trace, Turn

Sample = Callable[[OpenSession, list[int], int, int], tuple[list[int], list[float]]]
Reply = tuple[int, str, bytes]  # status, content type, body
JSON, EVENTS = "application/json", "text/event-stream"


@dataclass
class Recorded:
    """A session. `turns` outlive a new opening, `branches` do not."""

    wanted: OpenSession
    answers: dict[str, list[int]] = field(default_factory=dict)  # tokens by what was asked
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    branches: list[Branch] = field(default_factory=list)
    named: dict[str, Reply] = field(default_factory=dict)  # answers by the request's name
    asked: Counter[str] = field(default_factory=Counter)
    limit: str = ""


class StandInSessions:
    """Answers what `policies.serving.sessions` lists.

    Args:
        encode: makes token ids of a text; `decode` the reverse.
        sample: given what was opened, a prompt, a seed and the most tokens: tokens and log-probabilities.

    Attributes:
        opened: every opening, as (session, seed).
        made: turns that were sampled, as (session, number of the session's turn).
        forgotten: sessions that were deleted.
        policies: the version of each session.
        on_turn: called before a turn is sampled, with the session.
    """

    def __init__(
        self, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str], sample: Sample
    ) -> None:
        self._encode, self._decode, self._sample = encode, decode, sample
        self.recorded: dict[str, Recorded] = {}
        self.opened: list[tuple[str, int]] = []
        self.made: list[tuple[str, int]] = []
        self.forgotten: list[str] = []
        self.policies: dict[str, str] = {}
        self.on_turn: Callable[[str], None] = lambda _: None
        self._lock = threading.Lock()

    def answer(self, method: str, path: str, body: bytes, request: str = "") -> Reply:
        name, _, rest = path.removeprefix(f"{SESSIONS}/").partition("/")
        match method, rest:
            case "PUT", "":
                self._open(name, msgspec.json.decode(body, type=OpenSession))
                return 204, JSON, b""
            case "GET", "" if name in self.recorded:
                one = self.recorded[name]
                return 200, JSON, to_json(Trace(name, one.wanted.policy.label, one.branches, 0, one.limit))
            case "DELETE", "":
                self.forgotten.append(name)
                self.recorded.pop(name, None)
                return 204, JSON, b""
            case "POST", "v1/chat/completions" if name in self.recorded:
                self.on_turn(name)
                with self._lock:
                    session = self.recorded[name]
                    if request not in session.named:
                        answer = self._turn(name, session, json.loads(body))
                        session.named[request or str(len(session.named))] = answer
                        return answer
                    return session.named[request]
        return 404, JSON, json.dumps({"error": {"message": "no such session", "code": LOST_CODE}}).encode()

    def _open(self, name: str, wanted: OpenSession) -> None:
        self.opened.append((name, wanted.seed))
        self.policies[name] = wanted.policy.version
        before = self.recorded.get(name)
        if before is None or before.wanted.policy.label != wanted.policy.label:
            self.recorded[name] = Recorded(wanted)
        else:
            self.recorded[name] = replace(before, branches=[], named={}, asked=Counter(), limit="")

    def _turn(self, name: str, session: Recorded, asked: dict[str, Any]) -> Reply:
        messages = [{key: one[key] for key in ("role", "content")} for one in asked["messages"]]
        text, wanted = json.dumps(messages), session.wanted
        key = f"{text}{session.asked[text] or ''}"
        made = sum(sum(branch.mask) for branch in session.branches)
        left = min(asked.get("max_tokens") or 1 << 30, wanted.tokens_max - made)
        for limit, is_over in (
            ("turns_max", session.asked.total() >= wanted.turns_max),
            ("tokens_max", left <= 0),
        ):
            if is_over:
                session.limit = limit
                error = {"message": f"beyond {limit}", "code": LIMIT_CODE, "type": "invalid_request_error"}
                return 400, JSON, json.dumps({"error": error}).encode()
        session.asked[text] += 1
        prompt = self._rendered(session, messages)
        if key not in session.answers:
            self.made.append((name, len(session.answers)))
            words = hashlib.blake2b(f"{wanted.seed}{prompt}{key}".encode(), digest_size=4).digest()
            made_now = self._sample(wanted, prompt, int.from_bytes(words, "big"), left)
            session.answers[key], session.logprobs[key] = made_now
        said = self._decode(session.answers[key])
        self._record(session, prompt, key, messages, said)
        return _said(asked, said)

    def _rendered(self, session: Recorded, messages: list[dict[str, Any]]) -> list[int]:
        """Recorded tokens where an answer was recorded behind the same messages."""
        tokens: list[int] = []
        for at, message in enumerate(messages):
            recorded = session.answers.get(json.dumps(messages[:at]))
            is_recorded = recorded is not None and self._decode(recorded) == message["content"]
            tokens += recorded if is_recorded and recorded else self._encode(str(message["content"]))
        return tokens

    def _record(
        self, session: Recorded, prompt: list[int], key: str, messages: list[dict[str, Any]], text: str
    ) -> None:
        tokens, logprobs = session.answers[key], session.logprobs[key]
        turn = Turn(len(prompt), len(prompt) + len(tokens), "stop", "stand-in")
        whole = [*messages, {"role": "assistant", "content": text}]
        if any(whole == branch.messages for branch in session.branches):
            return
        for at, branch in enumerate(session.branches):
            if messages[: len(branch.messages)] == branch.messages:
                assert prompt[: len(branch.token_ids)] == branch.token_ids
                gap = len(prompt) - len(branch.token_ids)
                del session.branches[at]
                session.branches.append(
                    Branch(
                        prompt + tokens,
                        branch.prompt_tokens,
                        [*branch.mask, *[0] * gap, *[1] * len(tokens)],
                        [*branch.logprobs, *[0.0] * gap, *logprobs],
                        [*branch.turns, turn],
                        whole,
                    )
                )
                return
        mask, of_prompt = [0] * len(prompt) + [1] * len(tokens), [0.0] * len(prompt)
        session.branches.append(Branch(prompt + tokens, len(prompt), mask, of_prompt + logprobs, [turn], whole))


def _said(asked: dict[str, Any], text: str) -> Reply:
    choice = {"index": 0, "finish_reason": "stop"}
    told = {"id": "turn", "created": 0, "model": "policy"}
    if asked.get("stream"):
        chunk = {**told, "object": "chat.completion.chunk", "choices": [{**choice, "delta": {"content": text}}]}
        return 200, EVENTS, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
    message = {"role": "assistant", "content": text}
    whole = {**told, "object": "chat.completion", "choices": [{**choice, "message": message}]}
    return 200, JSON, json.dumps(whole).encode()
