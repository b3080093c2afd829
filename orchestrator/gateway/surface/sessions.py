"""Sessions of agents: turns that survive the loss of nodes, gateway and trainer, and become training rows.

`policies.serving.wire` defines the API. A turn is made once: it continues if its agent disconnects, and an
equal request in the same session gets the recorded turn. Requests are equal if their prompt, as tokens, and their
sampling parameters are. A turn's seed follows from both, so that a turn that is made again becomes the same.

A prompt begins with the recorded tokens of the turn that it continues. Rendering the text again could differ: a
model may encode an answer in other tokens than the tokenizer, and a template may print a tool call differently.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import structlog
from blake3 import blake3

from grpo_orch.orchestrator.gateway.job import Finished, Job
from grpo_orch.orchestrator.gateway.routing.dispatch import Completer, Ledger
from grpo_orch.orchestrator.gateway.routing.gateway_members import Members
from grpo_orch.orchestrator.gateway.surface.admission import ApiError
from grpo_orch.orchestrator.gateway.surface.chat import Answer, Chat, Prompt, Translator
from grpo_orch.orchestrator.gateway.surface.session_log import (
    Record,
    SessionClosed,
    SessionLog,
    SessionOpened,
    TurnAnswered,
    TurnGenerated,
    TurnId,
    TurnPart,
)
from grpo_orch.policies.serving.wire import (
    LIMIT_CODE,
    LOST_CODE,
    TURNS_AT_ONCE_MAX,
    Branch,
    OpenSession,
    Trace,
    Turn,
    labelled_version,
)

log = structlog.get_logger()

# A restarted trainer loads its model before it opens its sessions again.
SESSION_TTL_S = 1800.0
POLICY_HELD_S = 300.0
PART_S = 0.25
SEED_BITS = 63
_encode = msgspec.json.Encoder(order="deterministic").encode


@dataclass(slots=True, eq=False)
class _Turn:
    """One turn."""

    id: TurnId
    job: Job
    finished: asyncio.Future[Finished]
    answer: Answer | None = None
    parent: _Turn | None = None
    continues: bool = False  # its messages are the parent's, the parent's answer, and `messages`
    messages: list[dict[str, Any]] = field(default_factory=list)
    rendered: int = 0  # tokens of its prompt as vLLM rendered it
    recorded: int = 0  # tokens recorded while it is unfinished
    recorded_ids: list[int] | None = None  # the job's list at that time; a job that starts over has a new list

    @property
    def prompt(self) -> array[int]:
        prompt: array[int] = self.job.body["prompt"]
        return prompt

    def tokens(self) -> array[int]:
        """Return the tokens of the prompt and the answer."""
        return self.prompt + array("I", self.job.token_ids)


@dataclass(slots=True, eq=False)
class _Session:
    """A session since it was opened last. Opened again, it is a new one that shares `turns` and `parts`."""

    name: str
    opened: OpenSession
    used_at_s: float  # on the event loop's clock
    turns: dict[TurnId, _Turn] = field(default_factory=dict)
    # Recorded token ids and log-probabilities of unfinished turns of an earlier gateway.
    parts: dict[TurnId, tuple[list[int], list[float]]] = field(default_factory=dict)
    answered: dict[TurnId, _Turn] = field(default_factory=dict)  # in this order
    # By a turn's key, for each number: whether a request waits for that turn or got it.
    claims: defaultdict[bytes, list[bool]] = field(default_factory=lambda: defaultdict(list))
    requests: dict[str, _Turn] = field(default_factory=dict)  # by the names that the agent gave them
    history: dict[bytes, _Turn] = field(default_factory=dict)  # by digest of the conversation up to the answer
    running: int = 0  # open requests of its agent
    awaited: list[_Turn] = field(default_factory=list)  # one for each request that waits for its turn
    limit: str = ""  # the limit that was reached
    is_wanted: bool = False  # counted in its policy's demand

    def claim(self, turn_id: TurnId) -> None:
        """Note that a request waits for a turn or got it."""
        key, number = turn_id
        claims = self.claims[key]
        claims += [False] * (number + 1 - len(claims))
        claims[number] = True

    def release(self, turn: _Turn) -> None:
        """Leave a turn to the next request for it, because its agent disconnected before the answer."""
        key, number = turn.id
        if number < len(self.claims[key]):
            self.claims[key][number] = False

    def add_answer(self, turn: _Turn, history: bytes, request_name: str) -> None:
        """Record that the agent gets the turn's answer."""
        self.claim(turn.id)
        self.answered[turn.id] = self.history[history] = turn
        if request_name:
            self.requests[request_name] = turn

    def forget(self, turn: _Turn) -> None:
        """Remove a turn that failed, so that the next request for it makes it again."""
        self.turns.pop(turn.id, None)
        self.requests = {name: other for name, other in self.requests.items() if other is not turn}
        self.release(turn)

    def tokens_left(self) -> int:
        """Return how many tokens the next turn may have."""
        return max(0, self.opened.tokens_max - sum(len(turn.job.token_ids) for turn in self.answered.values()))

    def next_number(self, key: bytes) -> int:
        """Return the number of the next turn with that key. Raises ApiError if the session has reached a limit."""
        claims = self.claims[key]
        if False in claims:
            return claims.index(False)
        if sum(map(len, self.claims.values())) >= self.opened.turns_max:
            self.limit = f"it has made {self.opened.turns_max} requests (turns_max)"
        elif not self.tokens_left():
            self.limit = f"its answers have {self.opened.tokens_max} tokens (tokens_max)"
        else:
            return len(claims)
        raise ApiError(400, f"the session has reached its limit: {self.limit}", code=LIMIT_CODE)


class Sessions:
    """All sessions of one gateway.

    Args:
        members: the gateway's.
        completer: completes the turns' jobs.
        ledger: the gateway's counts.
        translator: translates messages to tokens and back.
        session_log: records the turns.

    Attributes:
        ttl_s: how long an unused session stays.
        policy_held_s: how long after its last request members hold a session's policy.
        part_s: between two records of unfinished turns.
        turn_tasks: the tasks of the unfinished turns, each with its session's name.
    """

    def __init__(
        self,
        members: Members,
        completer: Completer,
        ledger: Ledger,
        translator: Translator,
        session_log: SessionLog,
    ) -> None:
        self._members, self._completer, self._ledger = members, completer, ledger
        self._translator, self._log = translator, session_log
        self.ttl_s, self.policy_held_s, self.part_s = SESSION_TTL_S, POLICY_HELD_S, PART_S
        self._sessions: dict[str, _Session] = {}
        self.turn_tasks: dict[asyncio.Task[None], tuple[str, _Turn]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def load(self, timeline: int) -> None:
        """Restore the sessions that earlier gateways recorded on `timeline`.

        Members do not hold a session's policy until an agent uses it, since it may be over.
        """
        for record in self._log.load():
            self._replay(record)
        for session in list(self._sessions.values()):
            if labelled_version(session.opened.policy.label).timeline != timeline:
                self._end(session)
        if self._sessions:
            log.info("sessions_restored", sessions=len(self._sessions))

    async def run(self) -> None:
        """Record the tokens of unfinished turns, and end unused sessions, forever."""
        while True:
            await asyncio.sleep(self.part_s)
            self.record_parts()
            now_s = asyncio.get_running_loop().time()
            for session in list(self._sessions.values()):
                idle_s = 0.0 if session.running else now_s - session.used_at_s
                if idle_s > self.ttl_s:
                    log.warning("session_expired", session=session.name, after_s=self.ttl_s)
                    self._end(session)
                elif idle_s > self.policy_held_s:
                    self._unwant(session)

    def close(self) -> None:
        """Record the unfinished turns and close the log."""
        self.record_parts()
        self._log.close()

    def open(self, name: str, parameters: OpenSession) -> None:
        """Open a session, or open it again: with the same parameters it keeps its recorded turns.

        Raises ApiError if it was opened later.
        """
        before = self._sessions.get(name)
        if before is not None and parameters.opening and parameters == before.opened:
            self._use(before)
            return
        if before is not None and parameters.opening and parameters.opening < before.opened.opening:
            raise _opened_later(name)
        session = _opened(name, parameters, before)
        if before is not None and before.turns is not session.turns:
            self._end(before)
        self._sessions[name] = session
        self._log.append(SessionOpened(name, parameters))
        self._use(session)
        if before is not None:
            self._unwant(before)

    def drop(self, name: str, opening: str = "") -> None:
        """End a session and drop its record. Raises ApiError; with `opening`, also if it was opened later."""
        session = self._get(name)
        if opening and opening < session.opened.opening:
            raise _opened_later(name)
        self._end(session)

    def open_requests(self, name: str) -> int:
        """Return how many requests of the session's agent are open. Raises ApiError."""
        return self._get(name).running

    def trace(self, name: str, opening: str = "") -> Trace:
        """Return the turns answered since the session was opened, as branches. Raises ApiError."""
        session = self._get(name, opening)
        turns = session.answered.values()
        parents = {id(turn.parent) for turn in turns}
        included: set[int] = set()
        branches = [_branch(turn, included) for turn in turns if id(turn) not in parents]
        discarded = sum(turn.job.discarded for turn in session.turns.values())
        return Trace(name, session.opened.policy.label, branches, discarded, session.limit)

    async def request(
        self, name: str, chat: Chat, request_name: str = "", opening: str = ""
    ) -> tuple[Finished, Answer]:
        """Return the turn for a chat, made now or recorded before. Raises ApiError, RequestRefused.

        The turn continues if its agent disconnects. Then the next request for the same turn gets it, or the next
        request with the same `request_name`. With `opening`, only that opening of the session is meant.
        """
        session = self._get(name, opening)
        if session.running >= TURNS_AT_ONCE_MAX:
            raise ApiError(429, f"the session already has {session.running} open requests; wait for their answers")
        session.running += 1
        self._use(session)
        try:
            turn = await self._turn(session, chat, request_name)
            return await self._deliver(session, turn, chat, request_name)
        except asyncio.CancelledError:
            self._check_open(session)
            raise
        finally:
            session.running -= 1
            session.used_at_s = asyncio.get_running_loop().time()

    async def _deliver(
        self, session: _Session, turn: _Turn, chat: Chat, request_name: str
    ) -> tuple[Finished, Answer]:
        """Wait for a turn and return it. If the agent disconnects first, the next request for it gets the turn."""
        session.awaited.append(turn)
        try:
            finished = await asyncio.shield(turn.finished)
            if turn.answer is None or (chat.parameters.logprobs and turn.answer.logprobs is None):
                turn.answer = await self._answer(turn, chat, finished)
            self._check_open(session)
            if turn.id not in session.answered:
                self._record_answer(session, turn, chat, request_name, turn.answer)
        finally:
            session.awaited.remove(turn)
            is_awaited = turn in session.awaited
            if not is_awaited and turn.id not in session.answered and session.turns.get(turn.id) is turn:
                session.release(turn)
        return finished, turn.answer

    def _check_open(self, session: _Session) -> None:
        """Raise ApiError if the session was closed or reopened since, when its turns became another agent's."""
        if self._sessions.get(session.name) is not session:
            raise ApiError(404, f"session {session.name} was closed or reopened", code=LOST_CODE)

    def _get(self, name: str, opening: str = "") -> _Session:
        """Return a session; with `opening`, only while it is that opening of it. Raises ApiError."""
        session = self._sessions.get(name)
        if session is None:
            raise ApiError(404, f"session {name} is not open", code=LOST_CODE)
        if opening and opening != session.opened.opening:
            raise ApiError(404, f"session {name} was reopened", code=LOST_CODE)
        return session

    async def _turn(self, session: _Session, chat: Chat, request_name: str) -> _Turn:
        """Return the turn that a chat requests, started if it is new."""
        if request_name not in session.requests:
            prompt, ids, parent, continues = await self._prompt(session, chat)
            self._check_open(session)
        if request_name in session.requests:
            known = session.requests[request_name]
            session.claim(known.id)
            return known
        sampling = {**chat.sampling, **prompt.sampling, **session.opened.sampling}
        sampling.pop("max_completion_tokens", None)
        sampling["max_tokens"] = min(prompt.max_tokens, session.tokens_left())
        if (sampling.get("min_tokens") or 0) > sampling["max_tokens"]:
            sampling["min_tokens"] = sampling["max_tokens"]
        key = blake3(ids.tobytes() + _encode(sampling)).digest(16)
        turn_id = key, session.next_number(key)
        session.claim(turn_id)
        turn = session.turns.get(turn_id)
        if turn is None:
            turn = session.turns[turn_id] = self._start_turn(session, turn_id, ids, sampling)
        turn.parent, turn.continues = parent, continues
        start = len(_conversation(parent)) + 1 if parent is not None and continues else 0
        turn.messages = chat.document["messages"][start:]
        turn.rendered = len(prompt.token_ids)
        if request_name:
            session.requests[request_name] = turn
        return turn

    async def _prompt(self, session: _Session, chat: Chat) -> tuple[Prompt, array[int], _Turn | None, bool]:
        """Return a chat's prompt as vLLM rendered it and with recorded tokens.

        Also returns the turn whose tokens it continues, and whether its messages continue that turn's.
        """
        rendered = await self._translator.prompt(chat)
        ids = array("I", rendered.token_ids)
        known = ((count, session.history.get(digest)) for count, digest in reversed(list(_digests(chat))))
        count, parent = next(((count, turn) for count, turn in known if turn is not None), (0, None))
        if parent is not None:
            recorded = await self._with_recorded_tokens(parent, chat, ids, chat.document["messages"][:count])
            if recorded is not None:
                return rendered, recorded, parent, True
        longest, length = None, 0
        for turn in session.answered.values():
            tokens = turn.tokens()
            if len(tokens) > length and ids[: len(tokens)] == tokens:
                longest, length = turn, len(tokens)
        return rendered, ids, longest, False

    async def _with_recorded_tokens(
        self, parent: _Turn, chat: Chat, ids: array[int], known: list[dict[str, Any]]
    ) -> array[int] | None:
        """Replace the rendered tokens of the parent turn by its recorded ones.

        Returns None if the template now prints the earlier messages differently.

        Args:
            ids: the rendered prompt.
            known: the messages up to the parent's answer.
        """
        recorded = parent.tokens()
        if ids[: len(recorded)] == recorded:
            return ids
        finished = parent.finished.result()
        if finished.finish_reason != "stop" or isinstance(finished.stop_reason, str) or not parent.job.token_ids:
            return None
        rendered = array("I", await self._translator.tokens(chat, known))
        if ids[: len(rendered)] != rendered:
            return None
        stop_token = parent.job.token_ids[-1]
        ends = [index for index in range(parent.rendered, len(rendered)) if rendered[index] == stop_token]
        return recorded + ids[ends[-1] + 1 :] if ends else None

    def _start_turn(
        self, session: _Session, turn_id: TurnId, prompt: array[int], sampling: dict[str, Any]
    ) -> _Turn:
        key, number = turn_id
        seed = blake3(session.opened.seed.to_bytes(8, "big") + key + number.to_bytes(8, "big")).digest(8)
        job = _job(session, prompt, {**sampling, "seed": int.from_bytes(seed, "big") >> (64 - SEED_BITS)})
        part = session.parts.pop(turn_id, None)
        if part is not None:
            self._completer.restore(job, *part)
        turn = _Turn(turn_id, job, asyncio.get_running_loop().create_future())
        task = asyncio.ensure_future(self._make(session.name, turn))
        self.turn_tasks[task] = session.name, turn
        task.add_done_callback(self._forget_task)
        turn.finished.add_done_callback(lambda done: task.cancel() if done.cancelled() else None)
        return turn

    async def _make(self, name: str, turn: _Turn) -> None:
        try:
            finished = await self._completer.complete(turn.job)
        except asyncio.CancelledError:
            self._ledger.discarded += len(turn.job.token_ids)
            turn.finished.cancel()
            raise
        except Exception as error:  # noqa: BLE001  # raised to the waiting requests, and not recorded
            self._ledger.discarded += len(turn.job.token_ids)
            session = self._sessions.get(name)
            if session is not None and session.turns.get(turn.id) is turn:
                session.forget(turn)
            if not turn.finished.done():
                turn.finished.set_exception(error)
                turn.finished.exception()  # keeps asyncio from logging it if no request waits
            return
        if turn.finished.done():  # its session has just ended
            self._ledger.discarded += len(finished.token_ids)
            return
        self._ledger.delivered += len(finished.token_ids)
        self._log.append(
            TurnGenerated(
                name,
                turn.id,
                list(turn.prompt),
                finished.token_ids,
                finished.logprobs,
                finished.finish_reason,
                finished.stop_reason,
                finished.node,
                turn.job.handed_over,
            )
        )
        turn.finished.set_result(finished)

    def _forget_task(self, task: asyncio.Task[None]) -> None:
        name, _ = self.turn_tasks.pop(task)
        if name not in self._sessions:  # the turn may have got its place while its session ended
            self._members.table.end_session(name)

    async def _answer(self, turn: _Turn, chat: Chat, finished: Finished) -> Answer:
        """Return the message of a turn, with tool call ids that follow from the turn."""
        answer = await self._translator.answer(chat, finished)
        calls = answer.message.get("tool_calls")
        if not calls:
            return answer
        key, number = turn.id
        name = blake3(key + number.to_bytes(8, "big")).hexdigest(12)
        named = [{**call, "id": f"call_{name}{index:02d}"} for index, call in enumerate(calls)]
        return replace(answer, message={**answer.message, "tool_calls": named})

    def _record_answer(
        self, session: _Session, turn: _Turn, chat: Chat, request_name: str, answer: Answer
    ) -> None:
        """Record that the agent gets the turn's answer, and the conversation that ends with it."""
        *_, (_, before) = _digests(chat)
        history = _digest_with(before, answer.message)
        self._log.append(
            TurnAnswered(
                session.name,
                turn.id,
                request_name,
                None if turn.parent is None else turn.parent.id,
                turn.continues,
                turn.messages,
                turn.rendered,
                history,
                answer,
            )
        )
        session.add_answer(turn, history, request_name)

    def _replay(self, record: Record) -> None:
        """Apply a record of an earlier gateway."""
        session = self._sessions.get(record.session)
        if isinstance(record, SessionOpened):
            self._sessions[record.session] = _opened(record.session, record.parameters, session)
        elif session is None or isinstance(record, SessionClosed):
            return
        elif isinstance(record, TurnGenerated):
            session.turns.setdefault(record.turn, _restored_turn(session, record))
        elif isinstance(record, TurnPart):
            ids, logprobs = session.parts.setdefault(record.turn, ([], []))
            del ids[record.start :], logprobs[record.start :]
            ids += record.token_ids
            logprobs += record.logprobs
        elif (turn := session.turns.get(record.turn)) is not None:
            turn.parent = None if record.parent is None else session.turns.get(record.parent)
            turn.continues, turn.messages = record.continues, record.messages
            turn.rendered, turn.answer = record.rendered, record.answer
            session.add_answer(turn, record.history, record.request)

    def record_parts(self) -> None:
        """Record the new tokens of the unfinished turns."""
        for name, turn in self.turn_tasks.values():
            job = turn.job
            start = turn.recorded if job.token_ids is turn.recorded_ids else 0
            if turn.finished.done() or len(job.token_ids) == start:
                continue
            self._log.append(TurnPart(name, turn.id, start, job.token_ids[start:], job.logprobs[start:]))
            turn.recorded, turn.recorded_ids = len(job.token_ids), job.token_ids

    def _use(self, session: _Session) -> None:
        """Count the session in its policy's demand until it is unused for `policy_held_s`."""
        session.used_at_s = asyncio.get_running_loop().time()
        if not session.is_wanted:
            session.is_wanted = True
            self._members.want(session.opened.policy, 1, session.opened.recovery)

    def _unwant(self, session: _Session) -> None:
        """Remove the session from its policy's demand until it is used again."""
        if session.is_wanted:
            session.is_wanted = False
            self._members.finish(session.opened.policy.label, 1)

    def _end(self, session: _Session) -> None:
        """End a session, its unfinished turns and its record."""
        self._sessions.pop(session.name, None)
        for turn in session.turns.values():
            if not turn.finished.done():
                turn.finished.cancel()
        self._members.table.end_session(session.name)
        self._unwant(session)
        self._log.append(SessionClosed(session.name))


def _opened(name: str, parameters: OpenSession, before: _Session | None) -> _Session:
    """Return a newly opened session, with the turns of the one before it if its parameters make the same ones."""
    session = _Session(name, parameters, asyncio.get_running_loop().time())
    if before is not None and _makes(before.opened) == _makes(parameters):
        session.turns, session.parts = before.turns, before.parts
    return session


def _opened_later(name: str) -> ApiError:
    return ApiError(409, f"session {name} was opened later, by a newer trainer or call")


def _makes(parameters: OpenSession) -> tuple[object, ...]:
    """Return the parameters that a turn follows from, limits excluded."""
    return parameters.policy.label, parameters.seed, parameters.sampling, parameters.recovery


def _job(session: _Session, prompt: array[int], parameters: dict[str, Any]) -> Job:
    return Job(
        body={**parameters, "prompt": prompt},
        policy=session.opened.policy.label,
        group=session.name,
        recovery=session.opened.recovery,
        is_turn=True,
        is_admitted=True,
        prompt_size=prompt.itemsize * len(prompt),
    )


def _restored_turn(session: _Session, record: TurnGenerated) -> _Turn:
    """Return the finished turn of a record."""
    job = _job(session, array("I", record.prompt), {})
    job.token_ids, job.logprobs, job.handed_over = record.token_ids, record.logprobs, record.handed_over
    finished: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
    finished.set_result(Finished(job, record.finish_reason, record.stop_reason, record.node))
    return _Turn(record.turn, job, finished)


# Conversations are identified by a digest of the fields that make their prompt. Clients add OpenAI's other fields
# and omit empty ones.
_PROMPT_FIELDS = (
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "tools",
)
_MESSAGE_FIELDS = ("role", "content", "name", "tool_call_id")


def _digests(chat: Chat) -> Iterator[tuple[int, bytes]]:
    """Yield, after each message of a chat, the count so far and the digest of the conversation."""
    document = chat.document
    fields = {name: document.get(name) for name in _PROMPT_FIELDS}
    digest = blake3(_encode(fields)).digest(16)
    for count, message in enumerate(document["messages"], 1):
        digest = _digest_with(digest, message)
        yield count, digest


def _digest_with(digest: bytes, message: dict[str, Any]) -> bytes:
    fields: dict[str, Any] = {
        name: message.get(name) for name in _MESSAGE_FIELDS if message.get(name) not in (None, "")
    }
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        fields["reasoning"] = reasoning
    if calls := message.get("tool_calls"):
        fields["tool_calls"] = [_call(call) for call in calls] if isinstance(calls, list) else calls
    return blake3(digest + _encode(fields)).digest(16)


def _call(call: Any) -> Any:
    """Return the content of a tool call. An agent may have decoded and re-encoded its arguments."""
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            arguments = msgspec.json.decode(arguments)
    return [call.get("id"), function.get("name"), arguments]


def _conversation(turn: _Turn | None) -> list[dict[str, Any]]:
    """Return the messages of a turn's request."""
    parts: list[list[dict[str, Any]]] = []
    while turn is not None:
        parts.append(turn.messages)
        parent = turn.parent if turn.continues else None
        if parent is not None:
            assert parent.answer is not None
            parts.append([parent.answer.message])
        turn = parent
    return [message for part in reversed(parts) for message in part]


def _branch(leaf: _Turn, included: set[int]) -> Branch:
    """Return the training row of the branch that ends with this turn.

    `included` has the identities of turns in earlier branches, which are masked here; this branch's are added.
    """
    turns = [leaf]
    while turns[-1].parent is not None:
        turns.append(turns[-1].parent)
    turns.reverse()
    ids = leaf.tokens()
    mask, logprobs, branch_turns = [0] * len(ids), [0.0] * len(ids), []
    for turn in turns:
        finished = turn.finished.result()
        start = len(turn.prompt)
        end = start + len(finished.token_ids)
        if id(turn) not in included:
            mask[start:end] = [1] * (end - start)
            logprobs[start:end] = finished.logprobs
            included.add(id(turn))
        branch_turns.append(Turn(start, end, finished.finish_reason, finished.node, turn.job.handed_over))
    messages = _conversation(leaf) + ([leaf.answer.message] if leaf.answer is not None else [])
    return Branch(ids.tolist(), len(turns[0].prompt), mask, logprobs, branch_turns, messages)
