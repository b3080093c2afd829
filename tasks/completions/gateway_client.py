"""The trainer's side of `POST /v1/rollouts`: a batch in, all its completions out, whatever happens in between.

Gateways and nodes come and go. Here that is a wait, not an error: what has arrived is kept, what has not is asked
for again, at whatever address the store names by then.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import httpx
import msgspec
import structlog

from checkpoint.records import documents
from checkpoint.security import identity
from checkpoint.store.codec import to_json
from checkpoint.store.errors import Corrupt
from checkpoint.store.run_store import Store
from policies.serving.pieces import split_batches
from policies.serving.wire import (
    REFUSED,
    ROLLOUTS,
    Batch,
    BatchLine,
    Completion,
    CompletionRequest,
    Progress,
    PromptLine,
    Sample,
)
from tasks.storing.heartbeat import Heartbeat

log = structlog.get_logger()

RETRY_S = 0.5  # between two looks for a gateway
SILENT_S = 10.0  # the gateway reports several times a second: one that says nothing for so long is gone
SAY_WAITING_S = 10.0
PIECE_SIZE = 256 * 1024  # of a batch on its way
FATAL_STATUS = frozenset({400, 401, 403, 413, 415, 422})  # the gateway understood, and asking again will not help

_decoder = msgspec.json.Decoder(BatchLine)
NOBODY = ""  # in the place of a node
NOTHING = Progress(tokens=0, discarded=0, members=0, waiting=0)


class GenerationFailed(Exception):
    """The batch cannot be completed: the gateway refused it, or nothing moved until the deadline."""


class GatewayLost(Exception):
    """The gateway went away, or answers nonsense: to be tried again."""


@dataclass(frozen=True, slots=True)
class Generated:
    """A finished batch, in the order of its requests, and what was lost on the way."""

    completions: list[Completion]
    discarded: int  # tokens
    wait_s: float  # seconds in which no node could serve


class NobodyServes(Exception):
    """No rollout node has been there for the batch's patience.

    Args:
        made: what is finished.
        cut: what there is of others.
        discarded: tokens that were lost.
        wait_s: seconds in which no node could serve.
    """

    def __init__(self, made: list[Completion], cut: list[Completion], discarded: int, wait_s: float) -> None:
        super().__init__(f"no rollout node is there for {len(made)} finished and {len(cut)} begun completions")
        self.made, self.cut, self.discarded, self.wait_s = made, cut, discarded, wait_s

    def after(self, earlier: list[Generated]) -> NobodyServes:
        """The same, with parts of the batch that were finished before."""
        made = [completion for one in earlier for completion in one.completions]
        discarded, wait_s = sum(one.discarded for one in earlier), sum(one.wait_s for one in earlier)
        return NobodyServes([*made, *self.made], self.cut, discarded + self.discarded, wait_s + self.wait_s)


class GatewayClient:
    """Completes batches through the run's gateway.

    Args:
        store: where the gateway's address is.
        token: the run's secret.
        heartbeat: told whether the trainer waits or generates; ends a wait when a newer trainer appears.
        interrupt: raises LeaveNow when the trainer is to leave its machine.
    """

    def __init__(
        self, store: Store, token: str, heartbeat: Heartbeat, interrupt: Callable[[], None] = lambda: None
    ) -> None:
        self._store = store
        self._interrupt = interrupt
        # One client for all batches: making one takes 25 ms. The gateway stands beside the trainer: proxies that
        # the environment names are not for it.
        headers = {"Authorization": f"Bearer {token}"}
        timeout = httpx.Timeout(SILENT_S, connect=5.0)
        tls = identity.client_context(token)
        self._http = httpx.Client(headers=headers, timeout=timeout, trust_env=False, verify=tls)
        self._heartbeat = heartbeat
        self._say: Callable[[str], None] = heartbeat.say

    def complete(self, batch: Batch, arrived: Callable[[Completion], None] = lambda _: None) -> Generated:
        """Return once every request of the batch is finished; `arrived` is told of each when it is.

        What is more than a gateway takes at once, as an evaluation may be, is asked for part by part. A prompt
        without a token is refused here: the gateway would refuse the whole batch for it.

        Raises GenerationFailed after `batch.deadline_s` without a token or a node that gets on, or when the
        gateway refuses the batch; NobodyServes; Fenced; LeaveNow; StoreError.
        """
        told = [one for one in batch.requests if one.prompt_token_ids]
        made: list[Generated] = []
        for piece in split_batches(told):
            try:
                made.append(self._complete(replace(batch, requests=piece), arrived))
            except NobodyServes as nobody:
                raise nobody.after(made) from None
        found = {one.index: one for part in made for one in part.completions}
        return Generated(
            [found.get(one.index) or _refused(one, batch.policy.label) for one in batch.requests],
            sum(part.discarded for part in made),
            sum(part.wait_s for part in made),
        )

    def complete_aside(
        self, batch: Batch, arrived: Callable[[Completion], None], say: Callable[[str], None]
    ) -> Generated:
        """The same in a thread beside the trainer's: `say` is called instead of the heartbeat, and nothing but a
        newer trainer interrupts it."""
        beside = copy.copy(self)
        beside._say, beside._interrupt = say, lambda: None
        return beside.complete(batch, arrived)

    def go_on(self, _batch: Batch, nobody: NobodyServes) -> None:
        """Raises `nobody`: without a batch's patience there is none."""
        raise nobody

    def _complete(self, batch: Batch, arrived: Callable[[Completion], None]) -> Generated:
        call = _Call(batch, arrived)
        while not call.finished:
            try:
                url = self._address()
                for line in self._lines(url, call):
                    call.hear(line)
                    self._tell(call)
                    if line.end is not None:  # its counts are final; completions may be complete before it
                        break
                else:
                    raise GatewayLost("it ended its answer early")
            except (GatewayLost, httpx.TransportError) as error:
                call.cut()
                if not call.finished:
                    self._tell(call, error)
                    self._heartbeat.wait(RETRY_S)
        return call.result()

    def _address(self) -> str:
        try:
            address = documents.read_gateway(self._store)
        except Corrupt as error:
            raise GatewayLost(str(error)) from error
        if address is None:
            raise GatewayLost("the store names no gateway yet")
        return address.url

    def _lines(self, url: str, call: _Call) -> Iterator[BatchLine]:
        """Ask for what is missing and yield the answer's lines.

        Raises GatewayLost, GenerationFailed, httpx.TransportError.
        """
        where = f"{url.rstrip('/')}{ROLLOUTS}"
        body = body_of(call.missing())
        size = {"Content-Length": str(len(body))}
        with self._http.stream("POST", where, content=_pieces(body), headers=size) as answer:
            if answer.status_code in FATAL_STATUS:
                raise GenerationFailed(
                    f"the gateway answered {answer.status_code}: {answer.read().decode(errors='replace')[:500]}"
                )
            if answer.status_code != 200:
                raise GatewayLost(f"it answered {answer.status_code}")
            call.connected()
            for line in _split(answer.iter_bytes()):
                try:
                    yield _decoder.decode(line)
                except (ValueError, RecursionError) as error:  # DecodeError is a ValueError, as no UTF-8 is
                    raise GatewayLost(f"it sent {line[:80]!r}: {error}") from error

    def _tell(self, call: _Call, error: Exception | None = None) -> None:
        self._heartbeat.check()
        self._interrupt()
        self._say("generating" if call.served else "waiting")
        if call.idle_s > call.batch.deadline_s:
            raise GenerationFailed(
                f"no token for {call.idle_s:.0f} s; `rollout.deadline_s` allows {call.batch.deadline_s:.0f}"
            )
        if not call.served and call.to_be_said():
            log.info(
                "waiting_for_rollout_nodes",
                idle_s=round(call.idle_s, 1),
                missing=len(call.batch.requests) - len(call.done),
                gateway="answers" if error is None else str(error) or type(error).__name__,
            )


class _Call:
    """One batch on its way, over as many connections as it takes."""

    def __init__(self, batch: Batch, arrived: Callable[[Completion], None] = lambda _: None) -> None:
        self.batch = batch
        self._arrived = arrived
        self.done: dict[int, Completion] = {}
        self._cut: list[Completion] = []
        self.served = True  # whether a node could serve it, as far as is known
        self._discarded = 0  # over the connections that have ended
        self._wait_s = 0.0
        self._heard_s = self._moved_s = self._said_s = time.monotonic()
        self._last = NOTHING  # of this connection
        self._lost = (0, 0)  # with the last connection: what it had told as discarded, and what was on its way
        self._moves = 0  # of any connection: that one is made is no move
        self._finished_tokens = 0  # of this connection

    @property
    def finished(self) -> bool:
        return len(self.done) == len(self.batch.requests)

    @property
    def idle_s(self) -> float:
        """Seconds since a token last arrived, or a node that comes last got on."""
        return time.monotonic() - self._moved_s

    def missing(self) -> Batch:
        """The batch of what has not arrived."""
        return replace(self.batch, requests=[one for one in self.batch.requests if one.index not in self.done])

    def connected(self) -> None:
        """A gateway has taken the batch; that it has no node will be heard from it soon."""
        self._settle()
        self.served = True

    def hear(self, line: BatchLine) -> None:
        """Take one line of the answer. Raises GenerationFailed, GatewayLost, NobodyServes."""
        self._settle()
        if line.error is not None:
            raise GenerationFailed(f"the gateway gave up: {line.error}")
        if line.completion is not None:
            self._accept(line.completion)
        elif line.cut is not None:
            self._check(line.cut)
            self._cut.append(line.cut)
        elif (progress := line.end or line.progress) is not None:
            if progress.tokens > self._last.tokens or progress.moves > self._moves:
                self._moved_s = self._heard_s
            self._last, self._moves = progress, progress.moves
            self.served = progress.members > 0
            if line.end is not None and not self.finished:
                self._say_what_there_is()

    def cut(self) -> None:
        """The connection ended before the batch did. What was on its way is lost, unless the gateway keeps it."""
        self._settle()
        self._settle_lost()
        self._lost = self._last.discarded, max(0, self._last.tokens - self._finished_tokens)
        self._last, self._finished_tokens, self.served = NOTHING, 0, False
        self._cut.clear()

    def _settle_lost(self) -> None:
        """Count what was lost with the connection before this one, now that its last word is heard. A gateway that
        has kept something tells itself what it discarded."""
        (discarded, on_the_way), kept = self._lost, self._last.kept
        self._discarded += max(0, on_the_way - kept) + (0 if kept else discarded)
        self._lost = 0, 0

    def result(self) -> Generated:
        self._settle_lost()
        completions = [self.done[one.index] for one in self.batch.requests]
        return Generated(completions, self._discarded + self._last.discarded, self._wait_s)

    def to_be_said(self) -> bool:
        """Whether it is time to say again that the batch waits."""
        due = self._heard_s - self._said_s >= SAY_WAITING_S
        self._said_s = self._heard_s if due else self._said_s
        return due

    def _settle(self) -> None:
        """Account for the time since the gateway was last heard: it was waiting if no node could serve."""
        now_s = time.monotonic()
        self._wait_s += 0.0 if self.served else now_s - self._heard_s
        self._heard_s = now_s

    def _say_what_there_is(self) -> None:
        """The batch has ended with completions missing. Raises GatewayLost, NobodyServes."""
        if self.batch.patience_s is None:
            raise GatewayLost("it ended the batch with completions missing")
        self._settle_lost()
        discarded = self._discarded + self._last.discarded
        raise NobodyServes(list(self.done.values()), self._cut, discarded, self._wait_s)

    def _check(self, completion: Completion) -> None:
        wanted = self.batch.policy.label
        if completion.policy != wanted:
            raise GenerationFailed(
                f"node {completion.node} answered from policy {completion.policy}, not {wanted}"
            )
        if len(completion.logprobs) != len(completion.token_ids):
            raise GenerationFailed(f"node {completion.node} sent tokens without their log-probabilities")

    def _accept(self, completion: Completion) -> None:
        self._check(completion)
        self._moved_s = self._heard_s
        self.served = True
        self._finished_tokens += len(completion.token_ids)
        if completion.index not in self.done:
            self.done[completion.index] = completion
            self._arrived(completion)


def _refused(request: CompletionRequest, policy: str) -> Completion:
    return Completion(request.index, [], [], REFUSED, policy, NOBODY, "the prompt is empty")


def body_of(batch: Batch) -> bytes:
    """The batch as it is sent: each prompt once, whatever is asked of it."""
    lines = [to_json(replace(batch, requests=[]))]
    for prompt, requests in groupby(batch.requests, key=lambda one: one.prompt_token_ids):
        lines.append(to_json(PromptLine(prompt, [Sample(one.index, one.seed) for one in requests])))
    return b"\n".join(lines)


def _pieces(body: bytes) -> Iterator[bytes]:
    """What is sent as a whole is copied again for each part of it that the socket takes."""
    for start in range(0, len(body), PIECE_SIZE):
        yield body[start : start + PIECE_SIZE]


def _split(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the lines of a byte stream; a last line that was cut off is not one."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line for line in lines if line)
