"""The resume state: what the divergence detector knows of the steps before a restart, in a few kilobytes.

Each checkpoint has one; it is also stored by itself, more often than checkpoints are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from checkpoint.store import layout
from checkpoint.store.codec import check_schema, from_json, to_json
from checkpoint.store.run_store import Store
from policies.detect.divergence import Detector
from policies.model.vocabulary import PolicyVersion

SCHEMA = 3
KL_KEPT = 100  # logged KL values kept, the newest last


@dataclass(frozen=True, slots=True)
class ResumeState:
    """The run as of one step; `best_*` are None before any reward.

    `kl` holds (step, KL) as logged; a KL that was not a finite number is None.
    """

    schema: int
    policy: str  # PolicyVersion as text
    saved_at_s: float
    kl: list[tuple[int, float | None]] = field(default_factory=list)
    best_reward: float | None = None
    best_step: int | None = None
    detector: Detector = field(default_factory=Detector)


def write_resume_state(store: Store, state: ResumeState) -> None:
    store.put(layout.resume_state(PolicyVersion.parse(state.policy)), to_json(state))


def decode(data: bytes, where: str) -> ResumeState:
    """Read a stored state. Raises Corrupt naming `where`."""
    state = from_json(data, ResumeState, where)
    check_schema(state.schema, SCHEMA, where)
    return state
