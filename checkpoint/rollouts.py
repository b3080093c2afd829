"""The rollout journal: what one generate call brought, stored before the step is applied.

Generated tokens are the dear part of a step. A trainer that restarts takes them from here, so that the same step
costs no token twice and ends in the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from checkpoint import layout
from checkpoint.codec import from_json, to_json
from checkpoint.store import Store
from policies.vocabulary import PolicyVersion
from policies.wire import Completion, CompletionRequest

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Rollout:
    """All completions of one generate call, in the order of its requests.

    `requests_digest` says what was asked; `discarded` counts tokens generated for the call and lost with their
    node; `wait_s` is the time in which no node could serve it.
    """

    schema: int
    policy: str  # PolicyVersion as text
    call: int
    requests_digest: str
    completions: list[Completion]
    discarded: int = 0
    wait_s: float = 0.0


def digest_of(requests: list[CompletionRequest], sampling: dict[str, Any]) -> str:
    """BLAKE3, in hex, of prompts, seeds and sampling parameters: two calls of one digest ask for the same."""
    return blake3(to_json([sampling, requests])).hexdigest()


def write_rollout(store: Store, rollout: Rollout) -> None:
    """Store a finished call; a record of the same version and call is replaced."""
    store.put(layout.rollout(PolicyVersion.parse(rollout.policy), rollout.call), to_json(rollout))


def read_rollout(store: Store, version: PolicyVersion, call: int) -> Rollout | None:
    """Return the record of a call, or None. Raises Corrupt."""
    key = layout.rollout(version, call)
    data = store.get_or_none(key)
    return None if data is None else from_json(data, Rollout, key)


def stored_since(store: Store, version: PolicyVersion) -> frozenset[str]:
    """The names of the records of this version and of later ones on its timeline."""
    folder, _, first = layout.rollout(version, 0).rpartition("/")
    return frozenset(entry.key for entry in store.entries(folder, after=f"{folder}/{first.partition('-')[0]}"))
