"""Sessions of agents: turns that survive the loss of nodes, gateway and trainer, and become rows to train on.

The contract is in `policies.serving.sessions`. A turn is made once: it does not end with the connection of its
agent, and who asks for the same in the same session gets what was recorded. What it asks for is its prompt, as
tokens, with its sampling parameters; its seed follows from that, so that a turn that has to be made again becomes
the same.

A prompt begins with the recorded tokens of the turn that it continues. Text alone would not: a model may spell an
answer in other tokens than the tokenizer would, and a template may print a tool call otherwise than the model did.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import structlog
from blake3 import blake3

from orchestrator.gateway.job import Finished, Job, RequestRefused
from orchestrator.gateway.routing.dispatch import Completer, Ledger
from orchestrator.gateway.routing.members import Members
from orchestrator.gateway.surface.admission import ApiError
from orchestrator.gateway.surface.chat import Answer, Prompt, Translator
from orchestrator.gateway.surface.openai_request import Chat
from orchestrator.gateway.surface.session_log import Answered, Closed, Made, Opened, Part, Record, SessionLog
from policies.serving.sessions import LIMIT_CODE, LOST_CODE, TURNS_AT_ONCE_MAX, Branch, OpenSession, Trace, Turn
from policies.serving.wire import labelled_version

log = structlog.get_logger()

# A trainer that is started again loads its model before it opens its sessions again.
KEPT_S = 1800.0
HELD_S = 300.0  # that members hold the policy of a session that nobody asks
PART_S = 0.25  # between two looks for tokens of unfinished turns
SEED_BITS = 63
_encode = msgspec.json.Encoder(order="deterministic").encode


@dataclass(slots=True, eq=False)
class _Turn:
    """One turn. `number` counts those that ask for the same, by `key`."""

    key: bytes
    number: int
    job: Job
    finished: asyncio.Future[Finished]
    answer: Answer | None = None
    parent: _Turn | None = None
    continues: bool = False  # its messages are the parent's, the parent's answer, and `messages`
    messages: list[dict[str, Any]] = field(default_factory=list)
    rendered: int = 0  # tokens of its prompt as vLLM rendered it
    position: int | None = None  # in which its agent was answered since the session was opened
    waiters: int = 0  # that wait for it
    recorded: int = 0  # tokens that were written down while it was under way
    recorded_ids: list[int] | None = None  # the job's list that they are of: one that starts over has another

    @property
    def prompt(self) -> array[int]:
        found: array[int] = self.job.body["prompt"]
        return found

    def tokens(self) -> array[int]:
        """Its prompt and its answer."""
        return self.prompt + array("I", self.job.token_ids)


@dataclass(slots=True, eq=False)
class _Session:
    name: str
    opened: OpenSession
    opening: bytes  # what was said at its opening: turns of another are not its own
    turns: dict[tuple[bytes, int], _Turn] = field(default_factory=dict)  # by key and number
    request_counts: Counter[bytes] = field(default_factory=Counter)  # since it was opened
    unclaimed: defaultdict[bytes, set[int]] = field(default_factory=lambda: defaultdict(set))  # by who went away
    requests: dict[str, _Turn] = field(default_factory=dict)  # by the names that they were given
    answered: int = 0
    openings: int = 0
    running: int = 0  # requests of its agent that are open
    history: dict[bytes, _Turn] = field(default_factory=dict)  # by a conversation that ends with the turn's answer
    parts: dict[tuple[bytes, int], tuple[list[int], list[float]]] = field(default_factory=dict)
    limit: str = ""
    is_open: bool = False  # counted among the requests of its policy
    ends: asyncio.TimerHandle | None = None

    def answered_turns(self) -> list[_Turn]:
        """Its turns that were answered since it was opened, in that order."""
        found = [turn for turn in self.turns.values() if turn.position is not None]
        return sorted(found, key=lambda turn: turn.position or 0)

    def reset(self) -> None:
        """Nothing was asked for yet."""
        self.openings += 1
        self.request_counts.clear()
        self.unclaimed.clear()
        self.requests.clear()
        self.history.clear()
        self.answered, self.limit = 0, ""
        for turn in self.turns.values():
            turn.position = None

    def replay_answer(self, record: Answered) -> None:
        """A gateway before this one has told a turn."""
        turn = self.turns.get((record.key, record.number))
        if turn is not None:
            turn.parent = None if record.parent is None else self.turns.get(record.parent)
            turn.continues, turn.messages = record.continues, record.messages
            turn.rendered, turn.answer = record.rendered, record.answer
            self.add_answer(turn, record.history, record.request)

    def add_answer(self, turn: _Turn, history: bytes, request: str) -> None:
        """The turn is told."""
        self.history[history] = turn
        if request:
            self.requests[request] = turn
        turn.position, self.answered = self.answered, self.answered + 1

    def forget(self, turn: _Turn) -> None:
        """A turn was not made: who asks for it again gets it made."""
        self.turns.pop((turn.key, turn.number), None)
        self.requests = {name: one for name, one in self.requests.items() if one is not turn}
        if turn.number < self.request_counts[turn.key]:
            self.unclaimed[turn.key].add(turn.number)

    def count_answers(self) -> None:
        """Know what was asked for from what was told."""
        for turn in self.answered_turns():
            self.request_counts[turn.key] = max(self.request_counts[turn.key], turn.number + 1)
        for key, asked in self.request_counts.items():
            numbers = ((number, self.turns.get((key, number))) for number in range(asked))
            self.unclaimed[key] = {number for number, turn in numbers if turn is None or turn.position is None}


class Sessions:
    """All sessions of one gateway.

    Args:
        members: who makes the turns.
        completer: has them made.
        ledger: the gateway's counts.
        translator: messages to tokens and back.
        session_log: where turns are recorded.
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
        self._sessions: dict[str, _Session] = {}
        self._making: dict[asyncio.Task[None], tuple[_Session, _Turn]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def load(self, timeline: int) -> None:
        """Take over the sessions that earlier gateways have recorded on a timeline."""
        for record in self._log.load():
            self._replay(record)
        for session in list(self._sessions.values()):
            if labelled_version(session.opened.policy.label).timeline != timeline:
                self._end(session)
                continue
            session.count_answers()
            # One that nobody asks or opens is over, as far as is known: its policy is not held for it.
            self._schedule(session, KEPT_S, self._expire)
        if self._sessions:
            log.info("sessions_restored", sessions=len(self._sessions))

    async def run(self) -> None:
        """Write down unfinished turns as they grow, for ever."""
        while True:
            await asyncio.sleep(PART_S)
            self._record_parts()

    def close(self) -> None:
        """The gateway ends: write down what there is."""
        self._record_parts()
        self._log.close()

    def open(self, name: str, said: OpenSession) -> None:
        """Open a session, or open it again."""
        opening, session = _opening(said), self._sessions.get(name)
        if session is not None and session.opening != opening:
            self._end(session)
            session = None
        if session is None:
            session = self._sessions[name] = _Session(name, said, opening)
        session.opened = said
        session.reset()
        self._log.append(Opened(name, opening, said))
        self._touch(session)

    def open_if_new(self, name: str, policy: str | None = None) -> None:
        """Open a session that nobody has opened, with the newest policy.

        Args:
            policy: the label that its agent names, if any.

        Raises ApiError where it is of another, or none is wanted yet.
        """
        session, wanted = self._sessions.get(name), self._members.wanted
        found = session.opened.policy if session is not None else wanted
        if found is None:
            raise ApiError(503, "no policy is wanted yet: ask again later")
        if policy not in (None, found.label):
            raise ApiError(409, f"session {name} is of policy {found.label}, not {policy}")
        if session is None:
            self.open(name, OpenSession(found, _seed_of(name.encode()), recovery=self._members.recovery))

    def drop(self, name: str) -> None:
        """End a session, whose record is not needed any more. Raises ApiError."""
        self._end(self._get(name))

    def trace(self, name: str) -> Trace:
        """What was recorded of a session since it was opened. Raises ApiError."""
        session = self._get(name)
        turns = session.answered_turns()
        parents = {id(turn.parent) for turn in turns}
        told: set[int] = set()
        branches = [_branch(turn, told) for turn in turns if id(turn) not in parents]
        discarded = sum(turn.job.discarded for turn in session.turns.values())
        return Trace(name, session.opened.policy.label, branches, discarded, session.limit)

    async def ask(self, name: str, chat: Chat, request: str = "") -> tuple[Job, Finished, Answer]:
        """Return a turn: made now, or as it was recorded. It goes on when its agent goes away; then the next one
        that asks for the same gets it, or the next under the same name of a `request`. Raises ApiError."""
        session = self._get(name)
        if session.running >= TURNS_AT_ONCE_MAX:
            raise ApiError(429, f"the session has {session.running} open requests already; wait for their answers")
        session.running += 1
        openings = session.openings
        self._touch(session)
        try:
            turn = await self._turn(session, chat, request)
            return await self._deliver(session, turn, chat, request)
        except RequestRefused as error:
            raise ApiError(error.status, str(error)) from error
        except asyncio.CancelledError:
            self._check_open(session, openings)
            raise
        finally:
            session.running -= 1
            if self._sessions.get(name) is session:
                self._touch(session)

    async def _deliver(
        self, session: _Session, turn: _Turn, chat: Chat, request: str
    ) -> tuple[Job, Finished, Answer]:
        """Wait for a turn, and tell it to its agent. One that its agent does not get is left for the next."""
        openings = session.openings
        turn.waiters += 1
        try:
            finished = await asyncio.shield(turn.finished)
            if turn.answer is None or (chat.parameters.logprobs and turn.answer.logprobs is None):
                turn.answer = await self._answer(turn, chat, finished)
            self._check_open(session, openings)
            if turn.position is None:
                self._record_answer(session, turn, chat, request, turn.answer)
        finally:
            turn.waiters -= 1
            is_left = not turn.waiters and turn.position is None and session.openings == openings
            if is_left and session.turns.get((turn.key, turn.number)) is turn:
                session.unclaimed[turn.key].add(turn.number)
        return turn.job, finished, turn.answer

    def _check_open(self, session: _Session, openings: int) -> None:
        """Raise ApiError if the session was closed since, or opened again: the next agent's turns are its own."""
        if self._sessions.get(session.name) is not session or session.openings != openings:
            raise ApiError(404, f"session {session.name} was closed, or opened again", code=LOST_CODE)

    def _get(self, name: str) -> _Session:
        session = self._sessions.get(name)
        if session is None:
            raise ApiError(404, f"there is no session {name}", code=LOST_CODE)
        return session

    async def _turn(self, session: _Session, chat: Chat, request: str) -> _Turn:
        """The turn that a chat asks for, begun if it is a new one."""
        openings = session.openings
        if request not in session.requests:
            prompt, parent, continues = await self._prompt(session, chat)
            self._check_open(session, openings)
        if request in session.requests:
            known = session.requests[request]
            session.unclaimed[known.key].discard(known.number)
            return known
        sampling = {**chat.sampling, **prompt.sampling, **session.opened.sampling}
        sampling.pop("max_completion_tokens", None)
        sampling["max_tokens"] = min(prompt.max_tokens, _tokens_left(session))
        if (sampling.get("min_tokens") or 0) > sampling["max_tokens"]:
            sampling["min_tokens"] = sampling["max_tokens"]
        ids = array("I", prompt.token_ids)
        key = blake3(ids.tobytes() + _encode(sampling)).digest(16)
        if left := session.unclaimed[key]:
            number = min(left)
            left.discard(number)
        else:
            _check_limits(session)
            number = session.request_counts[key]
        session.request_counts[key] = max(session.request_counts[key], number + 1)
        turn = session.turns.get((key, number))
        if turn is None:
            turn = session.turns[key, number] = self._start_turn(session, key, number, ids, sampling)
        turn.parent, turn.continues = parent, continues
        start = len(_conversation(parent)) + 1 if parent is not None and continues else 0
        turn.messages = chat.document["messages"][start:]
        turn.rendered = prompt.rendered_tokens
        if request:
            session.requests[request] = turn
        return turn

    async def _prompt(self, session: _Session, chat: Chat) -> tuple[_RecordedPrompt, _Turn | None, bool]:
        """A chat's prompt; the turn that it continues, token by token; and whether its messages do, too."""
        rendered = await self._translator.prompt(chat)
        ids = array("I", rendered.token_ids)
        known = ((count, session.history.get(digest)) for count, digest in reversed(list(_digests(chat))))
        count, parent = next(
            (one for one in known if one[1] is not None and one[1].position is not None), (0, None)
        )
        if parent is not None:
            spelled = await self._with_recorded_tokens(parent, chat, ids, chat.document["messages"][:count])
            if spelled is not None:
                return _RecordedPrompt.of(rendered, spelled), parent, True
        longest, most = None, 0
        for turn in session.answered_turns():
            so_far = turn.tokens()
            if len(so_far) > most and ids[: len(so_far)] == so_far:
                longest, most = turn, len(so_far)
        return _RecordedPrompt.of(rendered, ids), longest, False

    async def _with_recorded_tokens(
        self, parent: _Turn, chat: Chat, ids: array[int], known: list[dict[str, Any]]
    ) -> array[int] | None:
        """The prompt with the recorded tokens of the turn that it continues in the place of the rendered ones;
        None where the template prints what was said before in another way now.

        Args:
            ids: the prompt as it was rendered.
            known: the messages up to the parent's answer.
        """
        so_far = parent.tokens()
        if ids[: len(so_far)] == so_far:
            return ids
        ended = parent.finished.result()
        if ended.finish_reason != "stop" or isinstance(ended.stop_reason, str) or not parent.job.token_ids:
            return None
        before = array("I", await self._translator.tokens(chat, known))
        if ids[: len(before)] != before:
            return None
        last = parent.job.token_ids[-1]  # that ended the answer
        ends = [place for place in range(parent.rendered, len(before)) if before[place] == last]
        return so_far + ids[ends[-1] + 1 :] if ends else None

    def _start_turn(
        self, session: _Session, key: bytes, number: int, prompt: array[int], sampling: dict[str, Any]
    ) -> _Turn:
        opened = session.opened
        seed = _seed_of(opened.seed.to_bytes(8, "big") + key + number.to_bytes(8, "big"))
        job = _job(session, prompt, sampling, seed)
        part = session.parts.pop((key, number), None)
        if part is not None:
            job.token_ids, job.logprobs = part
            if job.can_continue():
                job.first_token_at_s = asyncio.get_running_loop().time()
            else:
                job.discarded = job.start_over()
                self._ledger.discarded += job.discarded
        turn = _Turn(key, number, job, asyncio.get_running_loop().create_future())
        task = asyncio.ensure_future(self._make(session, turn))
        self._making[task] = session, turn
        task.add_done_callback(self._forget_task)
        turn.finished.add_done_callback(lambda done: task.cancel() if done.cancelled() else None)
        return turn

    async def _make(self, session: _Session, turn: _Turn) -> None:
        try:
            finished = await self._completer.complete(turn.job)
        except asyncio.CancelledError:
            self._ledger.discarded += len(turn.job.token_ids)
            turn.finished.cancel()
            raise
        except Exception as error:  # noqa: BLE001  # told to the one that asked, and not recorded
            self._ledger.discarded += len(turn.job.token_ids)
            session.forget(turn)
            if not turn.finished.done():
                turn.finished.set_exception(error)
                turn.finished.exception()  # that nobody may be there to hear it is no fault
            return
        if turn.finished.done():  # its session ended at this moment
            self._ledger.discarded += len(finished.token_ids)
            return
        self._ledger.delivered += len(finished.token_ids)
        self._log.append(_made_record(session, turn, finished))
        turn.finished.set_result(finished)

    def _forget_task(self, task: asyncio.Task[None]) -> None:
        session, _ = self._making.pop(task)
        if session.name not in self._sessions:  # it got its place as its session ended
            self._members.end_session(session.name)

    async def _answer(self, turn: _Turn, chat: Chat, finished: Finished) -> Answer:
        """The message of a turn, whose tool calls have names that follow from the turn."""
        answer = await self._translator.answer(chat, list(turn.prompt), finished)
        calls = answer.message.get("tool_calls")
        if not calls:
            return answer
        name = blake3(turn.key + turn.number.to_bytes(8, "big")).hexdigest(12)
        named = [{**call, "id": f"call_{name}{place:02d}"} for place, call in enumerate(calls)]
        return replace(answer, message={**answer.message, "tool_calls": named})

    def _record_answer(self, session: _Session, turn: _Turn, chat: Chat, request: str, answer: Answer) -> None:
        """The turn's agent gets its answer: know the conversation again that ends with it."""
        *_, (_, before) = _digests(chat)
        history = _with(before, answer.message)
        parent = None if turn.parent is None else (turn.parent.key, turn.parent.number)
        told = Answered(
            session.name,
            turn.key,
            turn.number,
            request,
            parent,
            turn.continues,
            turn.messages,
            turn.rendered,
            history,
            answer,
        )
        self._log.append(told)
        session.add_answer(turn, history, request)

    def _replay(self, record: Record) -> None:
        """Do again what a gateway before this one has recorded."""
        session = self._sessions.get(record.session)
        if isinstance(record, Opened):
            if session is None or session.opening != record.opening:
                session = self._sessions[record.session] = _Session(record.session, record.said, record.opening)
            session.opened = record.said
            session.reset()
        elif session is None:
            return
        elif isinstance(record, Answered):
            session.replay_answer(record)
        elif isinstance(record, Part) and record.opening == session.opening:
            ids, logprobs = session.parts.setdefault((record.key, record.number), ([], []))
            del ids[record.start :], logprobs[record.start :]
            ids += record.token_ids
            logprobs += record.logprobs
        elif isinstance(record, Made) and record.opening == session.opening:
            session.turns.setdefault((record.key, record.number), _restored_turn(session, record))

    def _record_parts(self) -> None:
        for session, turn in self._making.values():
            job = turn.job
            start = turn.recorded if job.token_ids is turn.recorded_ids else 0
            if turn.finished.done() or len(job.token_ids) == start:
                continue
            ids, logprobs = job.token_ids[start:], job.logprobs[start:]
            self._log.append(Part(session.name, session.opening, turn.key, turn.number, start, ids, logprobs))
            turn.recorded, turn.recorded_ids = len(job.token_ids), job.token_ids

    def _touch(self, session: _Session) -> None:
        """Count it as an open request of its policy for HELD_S, and end it if nobody asks for it within KEPT_S."""
        self._schedule(session, HELD_S, self._release)
        if not session.is_open:
            session.is_open = True
            self._members.want(session.opened.policy, 1, session.opened.recovery)

    def _schedule(self, session: _Session, after_s: float, end: Callable[[_Session], None]) -> None:
        if session.ends is not None:
            session.ends.cancel()
        session.ends = asyncio.get_running_loop().call_later(after_s, end, session)

    def _release(self, session: _Session) -> None:
        """Members need not hold its policy any more, until it is asked for."""
        if session.running:
            self._touch(session)
            return
        self._finish(session)
        self._schedule(session, KEPT_S - HELD_S, self._expire)

    def _expire(self, session: _Session) -> None:
        log.warning("session_expired", session=session.name, after_s=KEPT_S)
        self._end(session)

    def _finish(self, session: _Session) -> None:
        if session.is_open:
            session.is_open = False
            self._members.finish(session.opened.policy.label, 1)

    def _end(self, session: _Session) -> None:
        """It has no turn any more."""
        self._sessions.pop(session.name, None)
        if session.ends is not None:
            session.ends.cancel()
        for turn in session.turns.values():
            if not turn.finished.done():
                turn.finished.cancel()
        self._members.end_session(session.name)
        self._finish(session)
        self._log.append(Closed(session.name))


@dataclass(frozen=True, slots=True)
class _RecordedPrompt:
    """A prompt with the tokens that were recorded; otherwise as Prompt has it."""

    token_ids: array[int]
    rendered_tokens: int
    max_tokens: int
    sampling: dict[str, Any]

    @classmethod
    def of(cls, rendered: Prompt, ids: array[int]) -> _RecordedPrompt:
        return cls(ids, len(rendered.token_ids), rendered.max_tokens, rendered.sampling)


def _opening(said: OpenSession) -> bytes:
    return blake3(_encode([said.policy.label, said.seed, said.sampling, said.recovery])).digest(16)


def _seed_of(data: bytes) -> int:
    return int.from_bytes(blake3(data).digest(8), "big") >> (64 - SEED_BITS)


def _tokens_left(session: _Session) -> int:
    """How many tokens a turn may get."""
    return max(0, session.opened.tokens_max - sum(len(turn.job.token_ids) for turn in session.answered_turns()))


def _check_limits(session: _Session) -> None:
    """Raise ApiError if the session may have no more turns."""
    opened = session.opened
    if session.request_counts.total() >= opened.turns_max:
        session.limit = f"it made {opened.turns_max} requests, which is the limit of turns"
    elif not _tokens_left(session):
        session.limit = f"its answers have {opened.tokens_max} tokens, which is the limit"
    else:
        return
    raise ApiError(400, f"the session is at its end: {session.limit}", code=LIMIT_CODE)


def _job(session: _Session, prompt: array[int], sampling: dict[str, Any], seed: int) -> Job:
    return Job(
        body={**sampling, "prompt": prompt, "seed": seed},
        policy=session.opened.policy.label,
        group=session.name,
        prompt_tokens=len(prompt),
        recovery=session.opened.recovery,
        is_turn=True,
        is_admitted=True,
        prompt_size=prompt.itemsize * len(prompt),
        prompt_token_ids=prompt,
    )


def _made_record(session: _Session, turn: _Turn, finished: Finished) -> Made:
    return Made(
        session.name,
        session.opening,
        turn.key,
        turn.number,
        list(turn.prompt),
        finished.token_ids,
        finished.logprobs,
        finished.finish_reason,
        finished.stop_reason,
        finished.node,
        turn.job.handed_over,
    )


def _restored_turn(session: _Session, record: Made) -> _Turn:
    """A turn as it was recorded."""
    prompt = array("I", record.prompt)
    job = _job(session, prompt, {}, 0)
    job.token_ids, job.logprobs, job.handed_over = record.token_ids, record.logprobs, record.handed_over
    finished: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
    finished.set_result(
        Finished(
            token_ids=record.token_ids,
            logprobs=record.logprobs,
            finish_reason=record.finish_reason,
            stop_reason=record.stop_reason,
            text=None,
            prompt_token_ids=prompt,
            policy=job.policy,
            node=record.node,
            handovers=0,
            first_token_s=0.0,
            took_s=0.0,
        )
    )
    return _Turn(record.key, record.number, job, finished)


# Conversations, known by their content.

# What a template may print of a message. Clients add what OpenAI's have besides, and leave out what is empty.
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
    """After each message of a chat, how many there are and a digest of them, and of what else makes the prompt."""
    document = chat.document
    rest = {name: document.get(name) for name in _PROMPT_FIELDS}
    digest = blake3(_encode(rest)).digest(16)
    for count, message in enumerate(document["messages"], 1):
        digest = _with(digest, message)
        yield count, digest


def _with(digest: bytes, message: dict[str, Any]) -> bytes:
    said: dict[str, Any] = {
        name: message.get(name) for name in _MESSAGE_FIELDS if message.get(name) not in (None, "")
    }
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        said["reasoning"] = reasoning
    if calls := message.get("tool_calls"):
        said["tool_calls"] = [_call(call) for call in calls] if isinstance(calls, list) else calls
    return blake3(digest + _encode(said)).digest(16)


def _call(call: Any) -> Any:
    """A tool call, whose arguments an agent may have read and written again."""
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            arguments = msgspec.json.decode(arguments)
    return [call.get("id"), function.get("name"), arguments]


def _conversation(turn: _Turn | None) -> list[dict[str, Any]]:
    """The messages that a turn was asked with."""
    parts: list[list[dict[str, Any]]] = []
    while turn is not None:
        parts.append(turn.messages)
        parent = turn.parent if turn.continues else None
        if parent is not None:
            assert parent.answer is not None
            parts.append([parent.answer.message])
        turn = parent
    return [message for part in reversed(parts) for message in part]


def _branch(leaf: _Turn, told: set[int]) -> Branch:
    """The row of a branch that ends with this turn. `told`: the turns that earlier branches have, by identity."""
    turns = [leaf]
    while turns[-1].parent is not None:
        turns.append(turns[-1].parent)
    turns.reverse()
    ids = leaf.tokens()
    mask, logprobs, found = [0] * len(ids), [0.0] * len(ids), []
    for turn in turns:
        finished = turn.finished.result()
        start = len(turn.prompt)
        end = start + len(finished.token_ids)
        if id(turn) not in told:
            mask[start:end] = [1] * (end - start)
            logprobs[start:end] = finished.logprobs
            told.add(id(turn))
        found.append(Turn(start, end, finished.finish_reason, finished.node, turn.job.handed_over))
    messages = _conversation(leaf) + ([leaf.answer.message] if leaf.answer is not None else [])
    return Branch(ids.tolist(), len(turns[0].prompt), mask, logprobs, found, messages)
