"""The completions and sessions of each generate call, stored before its step is applied.

Generation is the expensive part of a step. A restarted trainer reads the completions from here, so that no token
is paid for twice and the step yields the same weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from grpo_orch.checkpoint.records import metrics
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.checkpoint.store.document import Document
from grpo_orch.checkpoint.store.errors import Corrupt
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import PolicyVersion, Precedence
from grpo_orch.policies.serving.wire import Branch, Completion, CompletionRequest

SCHEMA = 1
# The number of the first evaluation call. Evaluations must not shift the seeds and numbers of training calls, also
# after a restart.
EVALUATION_CALLS = 1_000_000


@dataclass(frozen=True, slots=True)
class Session:
    """The part of an agent's session that training needs.

    Args:
        index: of its request within the call.
        session: its name at the gateway.
        policy: the label of the version that generated its tokens.
        branches: as the gateway recorded them; empty if the agent requested no turn.
        reward: the agent's return value.
        failed: why the agent ended without returning; empty if it returned, also None.
        discarded: tokens generated for it and discarded.
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
        """Return the number of tokens that the policy generated."""
        return sum(sum(branch.mask) for branch in self.branches)

    @property
    def node(self) -> str:
        """Return the node of the last turn; empty without turns."""
        return self.branches[-1].turns[-1].node if self.branches else ""


@dataclass(frozen=True, slots=True)
class Rollout:
    """All completions or all sessions of one generate call, in the order of its requests. Written by the trainer.

    `requests_digest` identifies the requests (`digest_of`); `discarded` counts tokens generated for the call and
    lost with their node; `wait_s` is the time in seconds in which no node could serve it.
    """

    schema: int
    at: str  # the timeline and the number of completed steps at the request, as a PolicyVersion's text
    policy: str  # the version that sampled it, as text
    call: int
    requests_digest: str
    completions: list[Completion]
    discarded: int = 0
    wait_s: float = 0.0
    sessions: list[Session] = field(default_factory=list)

    @property
    def staleness(self) -> int:
        """Return the optimizer steps between the policy that sampled it and the one that trains on it."""
        return PolicyVersion.parse(self.at).step - PolicyVersion.parse(self.policy).step

    @property
    def tokens(self) -> int:
        completion_tokens = sum(len(completion.token_ids) for completion in self.completions)
        return completion_tokens + sum(session.tokens for session in self.sessions)


def digest_of(requests: Sequence[CompletionRequest], sampling: dict[str, Any]) -> str:
    """Return the BLAKE3 digest, in hex, of prompts, seeds and sampling parameters, which identifies a call."""
    return blake3(to_json([sampling, requests])).hexdigest()


def write_rollout(store: Store, rollout: Rollout, by: Precedence) -> None:
    """Store a finished call as the record of the trainer `by`; records of other trainers stay."""
    key = layout.rollout(PolicyVersion.parse(rollout.at), rollout.call, by)
    store.put(key, to_json(rollout))
    store.secure([key])  # the next step depends on it


def read_rollout(store: Store, key: str) -> Rollout | None:
    """Return the record of that name, or None. Raises Corrupt."""
    return Document(key, Rollout).read(store)


def stored_since(store: Store, version: PolicyVersion) -> dict[tuple[PolicyVersion, int], list[str]]:
    """Return the keys of the records since this version on its timeline, by version and call.

    The newest trainer's record comes first, however late an older one wrote.
    """
    before = layout.rollouts_of(version)
    found: dict[tuple[PolicyVersion, int], list[str]] = {}
    for entry in store.entries(before.rpartition("/")[0], after=before):
        with contextlib.suppress(ValueError):  # a foreign file in the prefix
            found.setdefault(layout.call_of(entry.key), []).append(entry.key)
    return {call: sorted(keys, key=layout.author_of, reverse=True) for call, keys in found.items()}


def unused_windows(store: Store, timeline: int) -> tuple[int, int]:
    """Return the number and the tokens of a timeline's stored training calls that no logged step has trained on.

    A call stored by two trainers counts once. Unreadable records are skipped. Raises StoreError.
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
    """Delete the records and samples of the versions that `unneeded` selects, and return their number.

    Raises StoreError.
    """
    records: dict[PolicyVersion, list[str]] = {}
    for entry in [*store.entries(layout.ROLLOUTS), *store.entries(layout.SAMPLES)]:
        with contextlib.suppress(ValueError):  # a foreign file in the prefix
            records.setdefault(layout.call_of(entry.key)[0], []).append(entry.key)
    doomed = [key for version in unneeded(list(records)) for key in records[version]]
    store.delete(doomed)
    return len(doomed)
