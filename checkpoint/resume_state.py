"""The light resume state: what a detector needs to know of the steps before a restart, in a few kilobytes.

It is stored more often than checkpoints, which hold everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from checkpoint import layout
from checkpoint.codec import from_json, to_json
from checkpoint.errors import Corrupt
from checkpoint.store import Store
from policies.vocabulary import PolicyVersion

SCHEMA = 2  # 1 had no steps in `kl`
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


def write_resume_state(store: Store, state: ResumeState) -> None:
    store.put(layout.resume_state(PolicyVersion.parse(state.policy)), to_json(state))


def newest_resume_state(store: Store, at_most: PolicyVersion) -> ResumeState | None:
    """Return the newest state of the timeline of `at_most`, not after its step; None where there is none.

    Raises Corrupt.
    """
    prefix = f"{layout.RESUME}/{at_most.timeline:04d}"
    keys = [entry.key for entry in store.entries(prefix) if layout.version_of(entry.key) <= at_most]
    return decode(store.get(keys[-1]), keys[-1]) if keys else None


def decode(data: bytes, where: str) -> ResumeState:
    """Read a stored state. Raises Corrupt naming `where`."""
    state = from_json(data, ResumeState, where)
    if state.schema > SCHEMA:
        raise Corrupt(f"{where}: schema {state.schema}", f"this grpo-orch reads up to {SCHEMA}; use a newer one")
    return state
