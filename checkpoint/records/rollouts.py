"""Stored completions and agents' sessions: the result of each generate call, written before its step is applied.

Generation is the expensive part of a step. A restarted trainer takes the completions from here, so that no token
is paid for twice and the step ends in the same weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from checkpoint.records import metrics
from checkpoint.store import layout
from checkpoint.store.codec import to_json
from checkpoint.store.document import Document
from checkpoint.store.errors import Corrupt
from checkpoint.store.run_store import Store
from policies.model.vocabulary import PolicyVersion, Precedence
from policies.serving.sessions import Branch
from policies.serving.wire import Completion, CompletionRequest

SCHEMA = 1
# Evaluation counts its calls from here: whether a step was evaluated must not move its training seeds, and a
# restart after an evaluation must number the training calls as before.
EVALUATION_CALLS = 1_000_000


@dataclass(frozen=True, slots=True)
class Session:
    """One agent's session: what training needs of it.

    Args:
        index: of its request within the call.
        session: its name at the gateway.
        policy: the label of the version that made its tokens.
        branches: as the gateway recorded them; none where the agent asked for no turn.
        reward: what the agent returned.
        failed: why the agent ended without an answer of its own; empty where it returned one, None included.
        discarded: tokens that were made for it and thrown away.
        is_cut: it reached one of its limits: time, turns or tokens.
    """

    index: int
    session: str
    policy: str
    branches: list[Branch]
    reward: float | None
    failed: str = ""
    discarded: int = 0
    is_cut: bool = False

    @property
    def tokens(self) -> int:
        """That the policy made."""
        return sum(sum(branch.mask) for branch in self.branches)

    @property
    def node(self) -> str:
        """That made its last turn; empty without any."""
        return self.branches[-1].turns[-1].node if self.branches else ""


@dataclass(frozen=True, slots=True)
class Rollout:
    """All completions of one generate call, or all sessions, in the order of its requests.

    `requests_digest` says what was asked; `discarded` counts tokens generated for the call and lost with their
    node; `wait_s` is the time in which no node could serve it.
    """

    schema: int
    at: str  # the timeline and the steps that were done when it was asked for, as a PolicyVersion's text
    policy: str  # the version that it was sampled from, as text
    call: int
    requests_digest: str
    completions: list[Completion]
    discarded: int = 0
    wait_s: float = 0.0
    sessions: list[Session] = field(default_factory=list)

    @property
    def staleness(self) -> int:
        """Optimizer steps between the policy that sampled it and the one that trains on it."""
        return PolicyVersion.parse(self.at).step - PolicyVersion.parse(self.policy).step

    @property
    def tokens(self) -> int:
        of_completions = sum(len(completion.token_ids) for completion in self.completions)
        return of_completions + sum(session.tokens for session in self.sessions)


def digest_of(requests: Sequence[CompletionRequest], sampling: dict[str, Any]) -> str:
    """BLAKE3, in hex, of prompts, seeds and sampling parameters: calls of equal digest ask for the same."""
    return blake3(to_json([sampling, requests])).hexdigest()


def write_rollout(store: Store, rollout: Rollout, by: Precedence) -> None:
    """Store a finished call as the record of the trainer `by`; another's of the same call is left alone."""
    key = layout.rollout(PolicyVersion.parse(rollout.at), rollout.call, by)
    store.put(key, to_json(rollout))
    store.secure([key])  # the step that is applied next rests on it


def read_rollout(store: Store, key: str) -> Rollout | None:
    """Return the record of that name, or None. Raises Corrupt."""
    return Document(key, Rollout).read(store)


def stored_since(store: Store, version: PolicyVersion) -> dict[tuple[PolicyVersion, int], list[str]]:
    """The keys of this version's records and of later ones on its timeline, by version and call: the newest
    trainer's first, however late an older one wrote."""
    before = layout.rollouts_of(version)
    found: dict[tuple[PolicyVersion, int], list[str]] = {}
    for entry in store.entries(before.rpartition("/")[0], after=before):
        with contextlib.suppress(ValueError):  # a foreign file in the prefix
            found.setdefault(layout.call_of(entry.key), []).append(entry.key)
    return {call: sorted(keys, key=layout.author_of, reverse=True) for call, keys in found.items()}


def unused_windows(store: Store, timeline: int) -> tuple[int, int]:
    """Return how many stored training calls of a timeline no logged step has trained on, and their tokens.

    A call that two trainers have stored counts once. Unreadable records are left out. Raises StoreError.
    """
    chunks = store.entries(layout.metrics(timeline))
    rows = metrics.read_chunk(store, chunks[-1].key) if chunks else []
    trained = PolicyVersion(timeline, max((row.step for row in rows), default=0))
    windows = tokens = 0
    for (_, call), keys in stored_since(store, trained).items():
        if call >= EVALUATION_CALLS:
            continue
        with contextlib.suppress(Corrupt):
            rollout = read_rollout(store, keys[0])
            if rollout is not None:
                windows, tokens = windows + 1, tokens + rollout.tokens
    return windows, tokens


def collect(store: Store, unneeded: Callable[[Sequence[PolicyVersion]], Iterable[PolicyVersion]]) -> int:
    """Delete the records of the versions that `unneeded` picks from all stored ones, and what people read of
    them (`checkpoint.records.samples`); return how many.

    Raises StoreError.
    """
    records: dict[PolicyVersion, list[str]] = {}
    for folder, call_of in ((layout.ROLLOUTS, layout.call_of), (layout.SAMPLES, layout.scored_call_of)):
        for entry in store.entries(folder):
            with contextlib.suppress(ValueError):  # a foreign file in the prefix
                records.setdefault(call_of(entry.key)[0], []).append(entry.key)
    doomed = [key for version in unneeded(list(records)) for key in records[version]]
    store.delete(doomed)
    return len(doomed)
