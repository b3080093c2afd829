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

from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.policies.serving.wire import LIMIT_CODE, LOST_CODE, SESSIONS, Branch, OpenSession, Trace, Turn

Sample = Callable[[OpenSession, list[int], int, int], tuple[list[int], list[float]]]
Reply = tuple[int, str, bytes]  # status, content type, body
JSON, EVENTS = "application/json", "text/event-stream"
REFUSED = ("n", "top_logprobs", "truncate_prompt_tokens")


@dataclass
class Recorded:
    """A session. Its answers outlive a new opening; what was told does not."""

    wanted: OpenSession
    answers: dict[str, list[int]] = field(default_factory=dict)  # tokens by what was asked
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    branches: list[Branch] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    told: dict[str, Branch] = field(default_factory=dict)  # by the conversation that ends with its last answer
    named: dict[str, Reply] = field(default_factory=dict)  # answers by the request's name
    asked: Counter[str] = field(default_factory=Counter)
    limit: str = ""


class StandInSessions:
    """Answers what `policies.serving.wire` lists.

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
                one, label = self.recorded[name], self.recorded[name].wanted.policy.label
                return 200, JSON, to_json(Trace(name, label, _each_once(one.branches), 0, one.limit))
            case "GET", "v1/models":
                return 200, JSON, json.dumps({"object": "list", "data": [{"id": "policy"}]}).encode()
            case "DELETE", "" if name in self.recorded:
                self.forgotten.append(name)
                del self.recorded[name]
                return 204, JSON, b""
            case "POST", "v1/chat/completions" if name in self.recorded:
                self.on_turn(name)
                with self._lock:
                    session = self.recorded.get(name)
                    if session is not None and request not in session.named:
                        answer = self._turn(name, session, json.loads(body))
                        session.named[request or str(len(session.named))] = answer
                        return answer
                    if session is not None:
                        return session.named[request]
        return _refused(404, "no such session", LOST_CODE)

    def _open(self, name: str, wanted: OpenSession) -> None:
        self.opened.append((name, wanted.seed))
        self.policies[name] = wanted.policy.version
        before = self.recorded.get(name)
        if before is None or _opening(before.wanted) != _opening(wanted):
            self.recorded[name] = Recorded(wanted)
        else:
            self.recorded[name] = Recorded(wanted, before.answers, before.logprobs)

    def _turn(self, name: str, session: Recorded, asked: dict[str, Any]) -> Reply:
        if refused := [key for key in REFUSED if asked.get(key) not in (None, 1)]:
            return _refused(400, f"leave `{refused[0]}` out", "unsupported_parameter")
        messages = [{key: one[key] for key in ("role", "content")} for one in asked["messages"]]
        text, wanted = json.dumps(messages), session.wanted
        key = f"{text}{session.asked[text] or ''}"
        left = wanted.tokens_max - sum(turn.end - turn.start for turn in session.turns)
        most = min(asked.get("max_tokens") or 1 << 30, left)
        for limit, is_over in (
            ("turns_max", session.asked.total() >= wanted.turns_max),
            ("tokens_max", left <= 0),
        ):
            if is_over:
                session.limit = limit
                return _refused(400, f"beyond {limit}", LIMIT_CODE)
        session.asked[text] += 1
        known = [at for at in range(len(messages)) if json.dumps(messages[:at]) in session.told]
        parent = session.told[json.dumps(messages[: known[-1]])] if known else None
        prompt = [] if parent is None else list(parent.token_ids)  # recorded tokens, not those of its text
        for message in messages[known[-1] if known else 0 :]:
            prompt += self._encode(str(message["content"]))
        if key not in session.answers:
            self.made.append((name, len(session.answers)))
            words = hashlib.blake2b(f"{wanted.seed}{prompt}{key}".encode(), digest_size=4).digest()
            made_now = self._sample(wanted, prompt, int.from_bytes(words, "big"), most)
            session.answers[key], session.logprobs[key] = made_now
        said = self._decode(session.answers[key])
        ended = "length" if len(session.answers[key]) >= most else "stop"
        self._record(session, parent, prompt, key, [*messages, {"role": "assistant", "content": said}], ended)
        return _said(asked, said, ended)

    def _record(
        self,
        session: Recorded,
        parent: Branch | None,
        prompt: list[int],
        key: str,
        whole: list[dict[str, Any]],
        ended: str,
    ) -> None:
        tokens, logprobs = session.answers[key], session.logprobs[key]
        turn = Turn(len(prompt), len(prompt) + len(tokens), ended, "stand-in")
        before = parent or Branch(prompt, len(prompt), [0] * len(prompt), [0.0] * len(prompt), [], [])
        gap = len(prompt) - len(before.token_ids)
        made = Branch(
            prompt + tokens,
            before.prompt_tokens,
            [*before.mask, *[0] * gap, *[1] * len(tokens)],
            [*before.logprobs, *[0.0] * gap, *logprobs],
            [*before.turns, turn],
            whole,
        )
        session.turns.append(turn)
        session.branches = [*[one for one in session.branches if one is not parent], made]
        session.told[json.dumps(whole)] = made


def _opening(said: OpenSession) -> object:
    """Sessions that were opened otherwise have other turns."""
    return said.policy.label, said.seed, said.sampling, said.recovery


def _each_once(branches: list[Branch]) -> list[Branch]:
    """The branches with a turn that several share in the mask of the first alone."""
    told: set[int] = set()
    found = []
    for branch in branches:
        mask, logprobs = list(branch.mask), list(branch.logprobs)
        for turn in branch.turns:
            if id(turn) in told:
                mask[turn.start : turn.end] = [0] * (turn.end - turn.start)
                logprobs[turn.start : turn.end] = [0.0] * (turn.end - turn.start)
            told.add(id(turn))
        found.append(replace(branch, mask=mask, logprobs=logprobs))
    return found


def _refused(status: int, message: str, code: str) -> Reply:
    error = {"message": message, "code": code, "type": "invalid_request_error"}
    return status, JSON, json.dumps({"error": error}).encode()


def _said(asked: dict[str, Any], text: str, ended: str) -> Reply:
    choice = {"index": 0, "finish_reason": ended}
    told = {"id": "turn", "created": 0, "model": "policy"}
    if asked.get("stream"):
        chunk = {**told, "object": "chat.completion.chunk", "choices": [{**choice, "delta": {"content": text}}]}
        return 200, EVENTS, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
    message = {"role": "assistant", "content": text}
    whole = {**told, "object": "chat.completion", "choices": [{**choice, "message": message}]}
    return 200, JSON, json.dumps(whole).encode()
