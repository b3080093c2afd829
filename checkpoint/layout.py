"""Every object name of a run, in one place. A run is one prefix of one store; nothing else lives there.

Numbers are zero-padded, so that a listing in name order is a listing in time order.
"""

from __future__ import annotations

import re

from policies.vocabulary import PolicyVersion

RUN = "run.json"  # the spec as validated, written once
LEASE = "lease.json"  # who steers now; a courtesy, the journal is the lock
CONTROLLER = "controller.json"  # the machine that the daemon lives on, where it has one of its own
SECRET = "secret.json"  # a digest of the secret that the machines hold
GATEWAY = "gateway.json"  # where the gateway listens
MEMBERS = "members.json"  # what the gateway knows of the rollout nodes
TRAINER = "trainer.json"  # the trainer's heartbeat
MACHINES = "machines"  # what each machine says of itself
JOURNAL = "journal"
SEGMENTS = "segments"  # what the journal holds, many entries to an object
COMMANDS = "commands"
CATALOG = "catalog"
CHECKPOINTS = "checkpoints"
BLOBS = "blobs"
POLICIES = "policies"
ROLLOUTS = "rollouts"
METRICS = "metrics"
RESUME = "resume"
TIMELINES = "timelines"  # how each timeline but the first began
REHEARSAL = "rehearsal"
EXPORTS = "exports"  # weights as plain files, for whoever has no grpo-orch
MANIFEST = "manifest.json"

METRICS_CHUNK_STEPS = 100  # steps in one metrics object: rewriting it each step stays under ~100 KB

_TIMELINE = re.compile(rf"{TIMELINES}/([0-9]{{4,}})\.json")
_NUMBERED = re.compile(rf"(?:{JOURNAL}|{SEGMENTS}|{CATALOG})/([0-9]{{12}})\.json")
_CHUNK = re.compile(rf"{BLOBS}/([0-9a-f]{{64}}\.[0-9]+)")
_CHECKPOINT = re.compile(rf"{CHECKPOINTS}/[0-9]{{4,}}/[0-9]{{8,}}-[0-9a-f]+\.json")


def journal_entry(number: int) -> str:
    return f"{JOURNAL}/{number:012d}.json"


def segment(last: int) -> str:
    return f"{SEGMENTS}/{last:012d}.json"


def number_of(key: str) -> int | None:
    """The number in the name of a journal entry, a segment or a catalog revision; None for a foreign object."""
    found = _NUMBERED.fullmatch(key)
    return int(found[1]) if found else None


def command(command_id: str) -> str:
    return f"{COMMANDS}/{command_id}.json"


def machine(node: str) -> str:
    return f"{MACHINES}/{node}.json"


def catalog_revision(number: int) -> str:
    return f"{CATALOG}/{number:012d}.json"


def checkpoint(version: PolicyVersion, nonce: str) -> str:
    """A checkpoint's manifest. Two uploads of one version never share a name."""
    return f"{CHECKPOINTS}/{version.timeline:04d}/{version.step:08d}-{nonce}.json"


def is_checkpoint(key: str) -> bool:
    """Whether the key is a checkpoint's manifest; foreign objects are not."""
    return _CHECKPOINT.fullmatch(key) is not None


def chunk_of(key: str) -> str | None:
    """The name of a checkpoint's chunk below BLOBS; None for a foreign object."""
    found = _CHUNK.fullmatch(key)
    return found[1] if found else None


def policy(version: PolicyVersion) -> str:
    return f"{POLICIES}/{version.timeline:04d}/{version.step:08d}"


def rollout(version: PolicyVersion, call: int) -> str:
    return f"{ROLLOUTS}/{version.timeline:04d}/{version.step:08d}-{call:02d}.json"


def metrics_chunk(timeline: int, step: int) -> str:
    return f"{METRICS}/{timeline:04d}/{step // METRICS_CHUNK_STEPS:08d}.jsonl"


def resume_state(version: PolicyVersion) -> str:
    return f"{RESUME}/{version.timeline:04d}/{version.step:08d}.json"


def timeline(number: int) -> str:
    return f"{TIMELINES}/{number:04d}.json"


def timeline_of(key: str) -> int | None:
    """The number in the name of a timeline's document; None for a foreign object."""
    found = _TIMELINE.fullmatch(key)
    return int(found[1]) if found else None


def rehearsal(number: int) -> str:
    return f"{REHEARSAL}/{number:04d}.json"


def export(version: PolicyVersion) -> str:
    """The folder of exported files; the document beside it, with `.json`, says that it is whole."""
    return f"{EXPORTS}/{version}"


def version_of(key: str) -> PolicyVersion:
    """Read the version back from any key under checkpoints/, policies/, resume/ or rollouts/.

    Raises ValueError for a foreign name.
    """
    parts = key.split("/")
    if len(parts) < 3:
        raise ValueError(f"not a versioned key: {key!r}")
    step = parts[2].removesuffix(".json").split("-")[0]
    return PolicyVersion(int(parts[1]), int(step))
