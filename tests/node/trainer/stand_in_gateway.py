"""A stand-in for the gateway and its nodes: one HTTP server in the test's process that samples with transformers.

It loads the policy that a batch names from the run's store, so a trainer that published other weights than it
trains shows in TRL's own `sampling/` metrics. Each completion is sampled alone from its seed: what it is does not
depend on what else was asked.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import GatewayAddress
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import Precedence
from grpo_orch.policies.serving.canary import Canary, disagreement
from grpo_orch.policies.serving.wire import (
    HEADER_REQUEST,
    REFUSED,
    SESSIONS,
    Batch,
    BatchLine,
    Completion,
    CompletionRequest,
    OpenSession,
    PolicyRef,
    Progress,
    PromptLine,
)
from grpo_orch.tasks.rollout.policy_folders import PolicyFolders
from grpo_orch.tasks.trl.canary import canary_of
from tests.stand_ins.stand_in_sessions import StandInSessions

TOKEN = "run-secret"
TURN_TOKENS = 6  # of one answer in a session
POLICIES_KEPT = 3  # a trainer may ask for so many at a time
TELL_S = (
    0.25  # as often, the trainer hears that it is there: of a gateway that is silent it thinks that it is gone
)


class StandInGateway:
    """Serves `POST /v1/rollouts` until closed. Its attributes are the tests' levers and records.

    Attributes:
        cut_after: close the connection without a word after so many completions; counts down over batches.
        members: what progress lines say; at 0 nothing is generated until it is raised.
        asked: every request seen, as (policy, seed).
        batches: how many requests each call had.
        prompts: the prompts of each policy's requests, as token ids.
        made: completions sent.
        refuses: whether no node takes a prompt.
        unproved: why a policy that was loaded is not what its trainer says that it computes.
        sessions: of agents, once `take_sessions` was called.
        on_asked: called with the version before a batch is answered.
        on_completion: called after each completion that was sent, with `made`.
    """

    def __init__(self, store: Store, scratch: Path, *, model: bool = True) -> None:
        self.store = store
        self.folders = PolicyFolders(store, scratch / "policies")
        self.samples_with_model = model
        self.members = 1
        self.cut_after: int | None = None
        self.asked: list[tuple[str, int]] = []
        self.batches: list[int] = []
        self.prompts: dict[str, set[tuple[int, ...]]] = {}
        self.made = 0
        self.refuses: Callable[[list[int]], bool] = lambda _: False
        self.on_asked: Callable[[str], None] = lambda _: None
        self.on_completion: Callable[[int], None] = lambda _: None
        self.unproved: list[str] = []
        self.sessions: StandInSessions | None = None
        self.policy_of: dict[str, torch.nn.Module] = {}
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None

    def open(self, by: Precedence = (0, 1, 1)) -> None:
        """Listen on a free port and write the address to the store, as the gateway beside the trainer `by`."""
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                if self.path.startswith(f"{SESSIONS}/"):
                    gateway.answer_session(self)
                else:
                    gateway.answer(self)

            def do_PUT(self) -> None:
                gateway.answer_session(self)

            do_GET = do_DELETE = do_PUT

            def log_message(self, *_: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{self._server.server_port}"
        documents.gateway(by).write(self.store, GatewayAddress(url, "stand-in"))

    def close(self) -> None:
        """Stop listening: the next connection is refused."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer_session(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["Content-Length"] or 0))
        if handler.headers["Authorization"] != f"Bearer {TOKEN}":
            handler.send_error(401, "who are you?")
            return
        assert self.sessions is not None, "the test has not made it"
        request = handler.headers[HEADER_REQUEST] or ""
        status, kind, answer = self.sessions.answer(handler.command, handler.path, body, request)
        if self._server is None:  # closed meanwhile: nobody gets an answer
            handler.close_connection = True
            return
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(answer)))
        handler.end_headers()
        with contextlib.suppress(ConnectionError):
            handler.wfile.write(answer)

    def take_sessions(self, tokenizer: Any) -> StandInSessions:
        """Serve agents' sessions, too, with this tokenizer."""

        def encode(text: str) -> list[int]:
            ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
            return ids

        def decode(ids: list[int]) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=True))

        def sample(wanted: OpenSession, prompt: list[int], seed: int, most: int) -> tuple[list[int], list[float]]:
            with self._lock:
                model = self._policy(wanted.policy)
                sampling = {**wanted.sampling, "max_tokens": min(most, TURN_TOKENS)}
                made: tuple[list[int], list[float]] = _sample(model, prompt, seed, sampling)
                return made

        self.sessions = StandInSessions(encode, decode, sample)
        return self.sessions

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        if handler.headers["Authorization"] != f"Bearer {TOKEN}":
            handler.send_error(401, "who are you?")
            return
        first, *lines = body.split(b"\n")
        batch = msgspec.json.decode(first, type=Batch)
        for line in (msgspec.json.decode(line, type=PromptLine) for line in lines):
            batch.requests.extend(
                CompletionRequest(one.index, line.prompt_token_ids, one.seed) for one in line.samples
            )
        seen = self.prompts.setdefault(batch.policy.version, set())
        seen.update(tuple(one.prompt_token_ids) for one in batch.requests)
        self.on_asked(batch.policy.version)
        self.batches.append(len(batch.requests))
        self.asked += [(batch.policy.version, one.seed) for one in batch.requests]
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        with contextlib.suppress(ConnectionError):  # the trainer was killed
            self._stream(handler, batch)

    def _stream(self, handler: BaseHTTPRequestHandler, batch: Batch) -> None:
        told = _Told(handler, lambda: self.members)
        try:
            self._tell(told, batch)
        finally:
            told.stop()

    def _tell(self, told: _Told, batch: Batch) -> None:
        while self.members == 0:
            told.line(BatchLine(progress=Progress(0, 0, 0, len(batch.requests))))
            time.sleep(0.05)
        for request in batch.requests:
            with self._lock:
                completion = self._complete(batch, request.index, request.prompt_token_ids, request.seed)
            if self.cut_after is not None:
                if self.cut_after == 0:
                    # These tokens were on their way: they arrived at the gateway, their completion never left it.
                    told.tokens += len(completion.token_ids)
                    told.line(BatchLine(progress=told.progress()))
                    self.cut_after = None
                    told.cut()
                    return
                self.cut_after -= 1
            told.line(BatchLine(completion=completion))
            self.made += 1
            self.on_completion(self.made)
        told.stop()
        told.line(BatchLine(end=told.progress()))
        told.end()

    def _complete(self, batch: Batch, index: int, prompt: list[int], seed: int) -> Completion:
        if self.refuses(prompt):
            said: dict[str, Any] = {"refused": "vLLM answered 400: too long", "limit_tokens": 9}
            return Completion(index, [], [], REFUSED, batch.policy.label, "stand-in", **said)
        if self.samples_with_model:
            token_ids, logprobs = _sample(self._policy(batch.policy), prompt, seed, batch.sampling)
        else:
            token_ids = [4 + (seed >> shift) % 80 for shift in range(batch.sampling["max_tokens"])]
            logprobs = [-1.0] * len(token_ids)
        return Completion(index, token_ids, logprobs, "length", batch.policy.label, "stand-in")

    def _policy(self, policy: PolicyRef) -> torch.nn.Module:
        version = policy.label
        if version not in self.policy_of:
            folder = self.folders.fetch(policy, lambda: True)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            self.unproved += _unproved(model, folder)
            self.policy_of = {**dict([*self.policy_of.items()][-POLICIES_KEPT + 1 :]), version: model}
            self.folders.keep_only(folder)
        return self.policy_of[version]


def _unproved(model: torch.nn.Module, folder: Path) -> list[str]:
    """Why the model's log-probabilities are not those that its trainer published; empty where they are."""
    if not (folder / layout.CANARY).exists():
        return [f"{folder.name} has no canary"]
    theirs = msgspec.json.decode((folder / layout.CANARY).read_bytes(), type=Canary)
    ours = [one for one in canary_of(model, "no").logprobs if one is not None]
    why = disagreement(theirs, ours, "float32")
    return [f"{folder.name}: {why}"] if why else []


class _Told:
    """An answer on its way: lines, and between them every TELL_S how far it is, however long one takes."""

    def __init__(self, handler: BaseHTTPRequestHandler, members: Callable[[], int]) -> None:
        self.tokens = 0
        self._handler, self._members = handler, members
        self._stopped, self._one_at_a_time = threading.Event(), threading.Lock()
        self._ticks = threading.Thread(target=self._tick, daemon=True)
        self._ticks.start()

    def line(self, line: BatchLine) -> None:
        data = to_json(line) + b"\n"
        with self._one_at_a_time:
            self._handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self._handler.wfile.flush()
            self.tokens += 0 if line.completion is None else len(line.completion.token_ids)

    def progress(self) -> Progress:
        return Progress(self.tokens, 0, self._members(), 0)

    def stop(self) -> None:
        """From now on only lines are sent."""
        self._stopped.set()
        self._ticks.join()

    def cut(self) -> None:
        """Close the connection without a word."""
        self.stop()
        self._handler.close_connection = True
        self._handler.connection.close()

    def end(self) -> None:
        self._handler.wfile.write(b"0\r\n\r\n")

    def _tick(self) -> None:
        with contextlib.suppress(ConnectionError):  # the trainer was killed
            while not self._stopped.wait(TELL_S):
                self.line(BatchLine(progress=self.progress()))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a trainer that was killed
            super().handle_error(*_)  # type: ignore[arg-type]  # handed on as they came


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not here to be read
def _sample(
    model: torch.nn.Module, prompt: list[int], seed: int, sampling: dict[str, float]
) -> tuple[list[int], list[float]]:
    generator = torch.Generator().manual_seed(seed)
    token_ids: list[int] = []
    logprobs: list[float] = []
    inputs, cache = torch.tensor([prompt]), None
    while len(token_ids) < sampling["max_tokens"]:
        out = model(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        row = torch.log_softmax(out.logits[0, -1].float() / (sampling["temperature"] or 1.0), dim=-1)
        drawn = torch.multinomial(row.exp(), 1, generator=generator)
        token = int(drawn if sampling["temperature"] else row.argmax())
        token_ids.append(token)
        logprobs.append(float(row[token]))
        ends = model.config.eos_token_id
        if token in (ends if isinstance(ends, list) else [ends]):
            break
        inputs = torch.tensor([[token]])
    return token_ids, logprobs
