"""Every object name of a run, in one place. A run is one prefix of one store; nothing else lives there.

Numbers are zero-padded, so that a listing in name order is a listing in time order.
"""

from __future__ import annotations

import re

from policies.model.vocabulary import PolicyVersion, Precedence

RUN = "run.json"  # the spec as validated, written once
PROOF = "run.mac.json"  # a MAC: machines check that run.json is the controller's
LEASE = "lease.json"  # who steers now, for people: the lock is the journal
CLOCK = "clock/now.json"  # written to be dated, by each who takes the run over: what time it is for the store
CONTROLLERS_BEFORE = "controllers_before.json"  # what such machines have cost that are gone
CONTROLLER = "controller.json"  # the machine that the daemon lives on, where it has one of its own
PLAN = "plan.json"  # what the fleet is to be, and why: for people
NOTIFIED = "notified.json"  # up to where of the journal people were told
SECRET = "secret.json"  # a digest of the secret that the machines hold
GATEWAYS = "gateways"  # where each trainer machine's gateway listens; the newest machine's is the run's
MEMBERS = "members"  # what each of them knows of the rollout nodes
TRAINER = "trainer.json"  # the trainer's heartbeat
STOPS = "stops"  # which attempts of a trainer are asked to end
MACHINES = "machines"  # what each machine says of itself
JOURNAL = "journal"
SEGMENTS = "segments"  # what the journal holds, many entries to an object
COMMANDS = "commands"
ASIDE = "unreadable"  # commands that nobody could read
CATALOG = "catalog"
CHECKPOINTS = "checkpoints"
BLOBS = "blobs"
POLICIES = "policies"
ROLLOUTS = "rollouts"
SAMPLES = "samples"  # what people read of a step: texts, rewards, advantages
SESSIONS = "sessions"  # finished turns of agents whose step is not stored yet
COMPILED = "compiled"  # what rollout nodes have compiled, by what it depends on
METRICS = "metrics"
TIMELINES = "timelines"  # how each timeline but the first began
REHEARSAL = "rehearsal"
MODELS = "models"  # base models, as they were on the hub
EVALUATIONS = "evaluations"  # runs of their own, each below its own name: evaluations of this run's policies
EVALUATED = "evaluated"  # in such a run: what came out, and the completions so far
EXPORTS = "exports"  # weights as plain files, for use without grpo-orch
MANIFEST = "manifest.json"
SNAPSHOT = "snapshot.json"  # of all weights, stored beside a policy that was published as a delta
MODEL = "model.safetensors"  # the weights of a policy
CANARY = "canary.json"  # beside the weights of a policy: what they compute

METRICS_CHUNK_STEPS = 100  # steps in one metrics object: rewriting it each step stays under ~100 KB

_TIMELINE = re.compile(rf"{TIMELINES}/([0-9]{{4,}})\.json")
_REHEARSAL = re.compile(rf"{REHEARSAL}/([0-9]{{4,}})\.json")
_METRICS = re.compile(rf"{METRICS}/[0-9]{{4,}}/([0-9]{{8,}})\.jsonl")
_NUMBERED = re.compile(rf"(?:{JOURNAL}|{SEGMENTS}|{CATALOG})/([0-9]{{12}})\.json")
_CHUNK = re.compile(rf"{BLOBS}/([0-9a-f]{{64}}\.[0-9]+)")
_GATEWAY = re.compile(rf"{GATEWAYS}/([0-9]+)-([0-9]+)-([0-9]+)\.json")
_ROLLOUT = re.compile(rf"{ROLLOUTS}/[0-9]+/[0-9]+-([0-9]+)-i[0-9]+-a[0-9]+\.json")
_SAMPLES = re.compile(rf"{SAMPLES}/[0-9]+/[0-9]+-([0-9]+)-i[0-9]+-a[0-9]+\.jsonl\.zst")
_AUTHOR = re.compile(r"-i([0-9]+)-a([0-9]+)(?:\.json|\.jsonl\.zst|/|$)")
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


def aside(key: str) -> str:
    return f"{ASIDE}/{key}"


def machine(node: str) -> str:
    return f"{MACHINES}/{node}.json"


def stop(node: str, attempt: int) -> str:
    return f"{STOPS}/{node}-a{attempt}.json"


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


def gateway(by: Precedence) -> str:
    return f"{GATEWAYS}/{_numbers(by)}.json"


def members(by: Precedence) -> str:
    return f"{MEMBERS}/{_numbers(by)}.json"


def gateway_of(key: str) -> Precedence | None:
    """Whose gateway the address of that name is; None for a foreign object."""
    found = _GATEWAY.fullmatch(key)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def _numbers(by: Precedence) -> str:
    return "{:04d}-{:06d}-{:04d}".format(*by)


def policy(version: PolicyVersion, by: Precedence) -> str:
    """A publisher's own folder."""
    return f"{POLICIES}/{version.timeline:04d}/{version.step:08d}{_author(by)}"


def rollouts_of(version: PolicyVersion) -> str:
    """How the names of the version's records begin."""
    return f"{ROLLOUTS}/{version.timeline:04d}/{version.step:08d}"


def rollout(version: PolicyVersion, call: int, by: Precedence) -> str:
    """A trainer's own record of a call."""
    return f"{rollouts_of(version)}-{call:02d}{_author(by)}.json"


def call_of(key: str) -> tuple[PolicyVersion, int]:
    """The call that a record below ROLLOUTS is of. Raises ValueError for a foreign name."""
    found = _ROLLOUT.fullmatch(key)
    if found is None:
        raise ValueError(f"not a record of a call: {key!r}")
    return version_of(key), int(found[1])


def samples_of_call(version: PolicyVersion, call: int, by: Precedence) -> str:
    """What a trainer wrote of the completions that it scored; `call` counts the scorings of that version."""
    return f"{SAMPLES}/{version.timeline:04d}/{version.step:08d}-{call:02d}{_author(by)}.jsonl.zst"


def scored_call_of(key: str) -> tuple[PolicyVersion, int]:
    """The scoring that a record below SAMPLES is of. Raises ValueError for a foreign name."""
    found = _SAMPLES.fullmatch(key)
    if found is None:
        raise ValueError(f"not a record of samples: {key!r}")
    return version_of(key), int(found[1])


def sessions(timeline: int, at_ms: int, number: int) -> str:
    """Turns that a trainer's gateway has recorded, at a time since 1970."""
    return f"{SESSIONS}/{timeline:04d}/{at_ms:013d}-{number:06d}.msgpack"


def author_of(key: str) -> Precedence:
    """Who wrote what has that name below POLICIES, ROLLOUTS or SAMPLES. Raises ValueError for a foreign name."""
    found = _AUTHOR.search(key)
    if found is None:
        raise ValueError(f"no author in the name: {key!r}")
    return version_of(key).timeline, int(found[1]), int(found[2])


def _author(by: Precedence) -> str:
    return f"-i{by[1]}-a{by[2]}"  # the timeline is in the folder's name


def compiled(key: str) -> str:
    return f"{COMPILED}/{key}"


def metrics(timeline: int) -> str:
    return f"{METRICS}/{timeline:04d}"


def metrics_chunk(timeline: int, step: int) -> str:
    return f"{METRICS}/{timeline:04d}/{step // METRICS_CHUNK_STEPS:08d}.jsonl"


def metrics_chunk_of(key: str) -> int | None:
    """The number in the name of a metrics object: its steps over METRICS_CHUNK_STEPS. None for a foreign one."""
    found = _METRICS.fullmatch(key)
    return int(found[1]) if found else None


def timeline(number: int) -> str:
    return f"{TIMELINES}/{number:04d}.json"


def timeline_of(key: str) -> int | None:
    """The number in the name of a timeline's document; None for a foreign object."""
    found = _TIMELINE.fullmatch(key)
    return int(found[1]) if found else None


def rehearsal(number: int) -> str:
    return f"{REHEARSAL}/{number:04d}.json"


def rehearsal_of(key: str) -> int | None:
    """The number in the name of a rehearsed fault; None for a foreign object."""
    found = _REHEARSAL.fullmatch(key)
    return int(found[1]) if found else None


def evaluation(name: str) -> str:
    return f"{EVALUATIONS}/{name}"


def evaluated(subject: str) -> str:
    """A policy's scores."""
    return f"{EVALUATED}/{subject}.json"


def samples(subject: str) -> str:
    """A policy's completions with their prompts and scores, a line each."""
    return f"{EVALUATED}/{subject}.jsonl"


def kept(digest: str) -> str:
    """The folder of a batch's completions so far."""
    return f"{EVALUATED}/kept/{digest}"


def kept_part(digest: str, by: Precedence, number: int, completions: int) -> str:
    """Some of them. The last number is how many, so that a listing tells how far it is."""
    return f"{kept(digest)}/{_numbers(by)}-{number:06d}-{completions}.json"


def kept_in(key: str) -> int:
    """How many completions a part holds, by its name. Raises ValueError for a foreign object."""
    return int(key.rpartition("-")[2].removesuffix(".json"))


def export(version: PolicyVersion) -> str:
    """The folder of exported files; the document beside it, with `.json`, says that it is whole."""
    return f"{EXPORTS}/{version}"


def version_of(key: str) -> PolicyVersion:
    """Read the version back from any key under checkpoints/, policies/, rollouts/ or samples/.

    Raises ValueError for a foreign name.
    """
    parts = key.split("/")
    if len(parts) < 3:
        raise ValueError(f"not a versioned key: {key!r}")
    step = parts[2].removesuffix(".json").split("-")[0]
    return PolicyVersion(int(parts[1]), int(step))
