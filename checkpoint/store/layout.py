"""The names of all objects of a run, which owns one prefix of a store.

Numbers are zero-padded, so that the order of names is the order of time.
"""

from __future__ import annotations

import re

from grpo_orch.policies.model.vocabulary import PolicyVersion, Precedence

RUN = "run.json"  # the spec as validated, written once
PROOF = "run.mac.json"  # a MAC, by which machines authenticate run.json
LEASE = "lease.json"  # which daemon controls the run, for people: the lock is the journal
CLOCK = "clock/now.json"  # written at each take-over, to read the store's clock from its modification time
CONTROLLERS_BEFORE = "controllers_before.json"  # the rentals of terminated controller machines
CONTROLLER = "controller.json"  # the daemon's own machine, with `--remote`
PLAN = "plan.json"  # the planned fleet and the reasons, for people
NOTIFIED = "notified.json"  # the last journal entry sent to each notification channel
SECRET = "secret.json"  # a digest of the machines' secret
GATEWAYS = "gateways"  # the address of each trainer machine's gateway; the newest machine's is the run's
MEMBERS = "members"  # each gateway's status of the rollout nodes
TRAINER = "trainer.json"  # the trainer's heartbeat
STOPS = "stops"  # requests to trainers' attempts to end
MACHINES = "machines"  # the machines' reports
JOURNAL = "journal"
SEGMENTS = "segments"  # the journal again, many entries in an object
COMMANDS = "commands"
ASIDE = "unreadable"  # unreadable commands
CATALOG = "catalog"
CHECKPOINTS = "checkpoints"
BLOBS = "blobs"
POLICIES = "policies"
ROLLOUTS = "rollouts"
SAMPLES = "samples"  # a step's texts, rewards and advantages, for people
SESSIONS = "sessions"  # finished turns of agents whose step is not stored yet
COMPILED = "compiled"  # rollout nodes' compile caches, by a digest of their inputs
METRICS = "metrics"
TIMELINES = "timelines"  # the fork of each timeline but the first
REHEARSAL = "rehearsal"
MODELS = "models"  # base models from the hub
EVALUATIONS = "evaluations"  # evaluations of this run's policies: runs below their own names
EVALUATED = "evaluated"  # in an evaluation: results
MANIFEST = "manifest.json"
SNAPSHOT = "snapshot.json"  # of all weights, next to a policy that was published as a delta
MODEL = "model.safetensors"  # the weights of a policy
CANARY = "canary.json"  # next to the weights of a policy: expected outputs

METRICS_CHUNK_STEPS = 100  # steps in one metrics object: rewriting it each step stays under ~100 KB

_METRICS = re.compile(rf"{METRICS}/[0-9]{{4,}}/([0-9]{{8,}})\.jsonl")
_NUMBERED = re.compile(rf"(?:{JOURNAL}|{SEGMENTS}|{CATALOG})/([0-9]{{12}})\.json")
_SHORT = re.compile(rf"(?:{TIMELINES}|{REHEARSAL})/([0-9]{{4,}})\.json")
_CHUNK = re.compile(rf"{BLOBS}/([0-9a-f]{{64}}\.[0-9]+)")
_GATEWAY = re.compile(rf"{GATEWAYS}/([0-9]+)-([0-9]+)-([0-9]+)\.json")
_CALL = re.compile(rf"(?:{ROLLOUTS}|{SAMPLES})/[0-9]+/[0-9]+-([0-9]+)-i[0-9]+-a[0-9]+\.(?:json|jsonl\.zst)")
_AUTHOR = re.compile(r"-i([0-9]+)-a([0-9]+)(?:\.json|\.jsonl\.zst|/|$)")
_CHECKPOINT = re.compile(rf"{CHECKPOINTS}/[0-9]{{4,}}/[0-9]{{8,}}-[0-9a-f]+\.json")


def journal_entry(number: int) -> str:
    return f"{JOURNAL}/{number:012d}.json"


def segment(last: int) -> str:
    return f"{SEGMENTS}/{last:012d}.json"


def number_of(key: str) -> int | None:
    """Return the number in the name of a journal entry, segment, catalog revision, timeline or rehearsed fault.

    None for a foreign object.
    """
    number = _number(_NUMBERED, key)
    return _number(_SHORT, key) if number is None else number


def _number(pattern: re.Pattern[str], key: str) -> int | None:
    found = pattern.fullmatch(key)
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
    """Return the key of a checkpoint's manifest. Each upload of a version has another name."""
    return f"{CHECKPOINTS}/{version.timeline:04d}/{version.step:08d}-{nonce}.json"


def is_checkpoint(key: str) -> bool:
    """Whether the key is that of a checkpoint's manifest."""
    return _CHECKPOINT.fullmatch(key) is not None


def chunk_of(key: str) -> str | None:
    """Return the name of a checkpoint's chunk below BLOBS; None for a foreign object."""
    found = _CHUNK.fullmatch(key)
    return found[1] if found else None


def gateway(by: Precedence) -> str:
    return f"{GATEWAYS}/{_numbers(by)}.json"


def members(by: Precedence) -> str:
    return f"{MEMBERS}/{_numbers(by)}.json"


def gateway_of(key: str) -> Precedence | None:
    """Return the trainer whose gateway's address has that name; None for a foreign object."""
    found = _GATEWAY.fullmatch(key)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def _numbers(by: Precedence) -> str:
    return "{:04d}-{:06d}-{:04d}".format(*by)


def policy(version: PolicyVersion, by: Precedence) -> str:
    """Return the folder of a policy by one publisher."""
    return f"{POLICIES}/{version.timeline:04d}/{version.step:08d}{_author(by)}"


def rollouts_of(version: PolicyVersion) -> str:
    """Return the prefix of the version's records."""
    return f"{ROLLOUTS}/{version.timeline:04d}/{version.step:08d}"


def rollout(version: PolicyVersion, call: int, by: Precedence) -> str:
    """Return the key of a trainer's record of a call."""
    return f"{rollouts_of(version)}-{call:02d}{_author(by)}.json"


def call_of(key: str) -> tuple[PolicyVersion, int]:
    """Return the call of a record below ROLLOUTS, or the scoring of one below SAMPLES.

    Raises ValueError for a foreign name.
    """
    number = _number(_CALL, key)
    if number is None:
        raise ValueError(f"not a record of a call: {key!r}")
    return version_of(key), number


def samples_of_call(version: PolicyVersion, call: int, by: Precedence) -> str:
    """Return the key of a trainer's samples of a scoring; `call` counts the scorings of that version."""
    return f"{SAMPLES}/{version.timeline:04d}/{version.step:08d}-{call:02d}{_author(by)}.jsonl.zst"


def sessions(timeline: int, at_ms: int, number: int) -> str:
    """Return the key of turns recorded by a trainer's gateway at `at_ms`, in ms since the epoch."""
    return f"{SESSIONS}/{timeline:04d}/{at_ms:013d}-{number:06d}.msgpack"


def author_of(key: str) -> Precedence:
    """Return the author of a key below POLICIES, ROLLOUTS or SAMPLES. Raises ValueError for a foreign name."""
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
    """Return the number of a metrics object: step // METRICS_CHUNK_STEPS. None for a foreign object."""
    return _number(_METRICS, key)


def timeline(number: int) -> str:
    return f"{TIMELINES}/{number:04d}.json"


def rehearsal(number: int) -> str:
    return f"{REHEARSAL}/{number:04d}.json"


def evaluation(name: str) -> str:
    return f"{EVALUATIONS}/{name}"


def evaluated(subject: str) -> str:
    """Return the key of a policy's scores."""
    return f"{EVALUATED}/{subject}.json"


def evaluated_samples(subject: str) -> str:
    """Return the key of a policy's completions with their prompts and scores, one a line."""
    return f"{EVALUATED}/{subject}.jsonl"


def version_of(key: str) -> PolicyVersion:
    """Return the version in a key below checkpoints/, policies/, rollouts/ or samples/.

    Raises ValueError for a foreign name.
    """
    parts = key.split("/")
    if len(parts) < 3:
        raise ValueError(f"not a versioned key: {key!r}")
    step = parts[2].removesuffix(".json").split("-")[0]
    return PolicyVersion(int(parts[1]), int(step))
