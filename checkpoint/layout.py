"""Every object name of a run, in one place. A run is one prefix of one store; nothing else lives there.

Numbers are zero-padded, so that a listing in name order is a listing in time order.
"""

from __future__ import annotations

from policies.vocabulary import PolicyVersion

RUN = "run.json"  # the spec as validated, written once
LEASE = "lease.json"  # who steers now; a courtesy, the journal is the lock
GATEWAY = "gateway.json"  # where the gateway listens
TRAINER = "trainer.json"  # the trainer's heartbeat
JOURNAL = "journal"
COMMANDS = "commands"
CHECKPOINTS = "checkpoints"
POLICIES = "policies"
ROLLOUTS = "rollouts"
METRICS = "metrics"
RESUME = "resume"
REHEARSAL = "rehearsal"
MANIFEST = "manifest.json"

METRICS_CHUNK_STEPS = 100  # steps in one metrics object: rewriting it each step stays under ~100 KB


def journal_entry(number: int) -> str:
    return f"{JOURNAL}/{number:012d}.json"


def command(command_id: str) -> str:
    return f"{COMMANDS}/{command_id}.json"


def checkpoint(version: PolicyVersion) -> str:
    return f"{CHECKPOINTS}/{version.timeline:04d}/{version.step:08d}"


def policy(version: PolicyVersion) -> str:
    return f"{POLICIES}/{version.timeline:04d}/{version.step:08d}"


def rollout(version: PolicyVersion, call: int) -> str:
    return f"{ROLLOUTS}/{version.timeline:04d}/{version.step:08d}-{call:02d}.json"


def metrics_chunk(timeline: int, step: int) -> str:
    return f"{METRICS}/{timeline:04d}/{step // METRICS_CHUNK_STEPS:08d}.jsonl"


def resume_state(version: PolicyVersion) -> str:
    return f"{RESUME}/{version.timeline:04d}/{version.step:08d}.json"


def rehearsal(number: int) -> str:
    return f"{REHEARSAL}/{number:04d}.json"


def version_of(key: str) -> PolicyVersion:
    """Read the version back from any key under checkpoints/, policies/, resume/ or rollouts/.

    Raises ValueError for a foreign name.
    """
    parts = key.split("/")
    if len(parts) < 3:
        raise ValueError(f"not a versioned key: {key!r}")
    step = parts[2].removesuffix(".json").split("-")[0]
    return PolicyVersion(int(parts[1]), int(step))
