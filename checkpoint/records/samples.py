"""What people read of a step: its groups as text, with what each completion earned and where it was made.

One object for each scoring of a step's completions: a zstd frame of JSON lines, first a Head, then a Group a line.
The trainer writes it after the reward and nothing depends on it; `rollouts/` is what a restart takes. Texts are
cut to TEXTS_CHARS an object, the longest first, in their middle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import zstandard

from checkpoint.store import layout
from checkpoint.store.codec import check_schema, from_json, to_json
from checkpoint.store.errors import Corrupt, NotFound
from checkpoint.store.run_store import Store
from policies.model.vocabulary import PolicyVersion, Precedence
from policies.serving.wire import HandOver

SCHEMA = 1
TEXTS_CHARS = 32 * 1024 * 1024  # of an object: 1,024 completions of about 8,000 tokens are whole
OBJECT_BYTES_MAX = 512 * 1024 * 1024  # unpacked: those as JSON at its longest, and the numbers
_PIECE_BYTES = 1024 * 1024
_LEVEL = 3  # text becomes a quarter at hundreds of MB/s


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a prompt or completion; without a role where it is plain text.

    `left_out` characters are missing before the last `after` of the text. `tokens`: that the model made of it, in
    an agent's session.
    """

    text: str
    role: str = ""
    left_out: int = 0
    after: int = 0
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion. What is not known is None: a reward of a function that gave none, a mismatch not measured.

    `mismatch_*` are of the distance between the log-probability that the node gave a token and the trainer's own,
    in natural logarithms. `handed_over_chars` are the places in the text of `handed_over`, where they are known.
    Of several turns `node` and `handed_over` are the first one's; of an agent's session `node` is the last one's,
    and `handed_over` all of them.
    """

    completion: list[Message]
    rewards: list[float | None]  # by function, in the order of the head
    reward: float | None  # their weighted sum
    advantage: float | None
    tokens: int | None  # that the model made
    cut: bool | None  # at its greatest length; a session at a limit of its own
    node: str = ""
    policy: str = ""  # the label of what made it
    handed_over: list[HandOver] = field(default_factory=list)
    handed_over_chars: list[int] = field(default_factory=list)
    mismatch_mean: float | None = None
    mismatch_max: float | None = None
    refused: str = ""  # why no node took the prompt
    failed: str = ""  # why the agent gave no reward


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its completions."""

    prompt: list[Message]
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class Head:
    """What an object's groups have in common."""

    schema: int
    policy: str  # PolicyVersion as text: whose completions these are
    step: int  # the first that trains on them, one after the policy's
    call: int
    time_s: float  # seconds since the epoch
    functions: list[str]
    weights: list[float]  # of the functions
    groups: int


def write_samples(store: Store, head: Head, groups: Sequence[Group], by: Precedence) -> None:
    """Store a scoring as the record of the trainer `by`. Raises StoreError."""
    key = layout.samples_of_call(PolicyVersion.parse(head.policy), head.call, by)
    packer = zstandard.ZstdCompressor(level=_LEVEL).compressobj()
    # A line at a time: encoding holds up all threads, and one of them trains.
    packed = [packer.compress(to_json(one) + b"\n") for one in (head, *cut_texts(groups))]
    store.put(key, b"".join([*packed, packer.flush()]))


def read_samples(store: Store, key: str) -> tuple[Head, Iterator[Group]]:
    """Return an object's head, and its groups, which are decoded as they are asked for.

    Raises NotFound, Corrupt.
    """
    data = store.get_or_none(key)
    if data is None:
        raise NotFound(f"{key} is gone", "the run keeps the completions of some steps only")
    lines = _lines(data, key)
    head = from_json(next(lines, b""), Head, key)
    check_schema(head.schema, SCHEMA, key)
    return head, _groups(lines, head, key)


def stored_calls(store: Store) -> dict[PolicyVersion, list[str]]:
    """The keys of what is stored of each version, in the order of its calls; of each call the newest trainer's."""
    found: dict[tuple[PolicyVersion, int], str] = {}
    for entry in store.entries(layout.SAMPLES):
        with contextlib.suppress(ValueError):  # a foreign file in the prefix
            call = layout.scored_call_of(entry.key)
            if call not in found or layout.author_of(found[call]) < layout.author_of(entry.key):
                found[call] = entry.key
    by_version: dict[PolicyVersion, list[str]] = {}
    for version, number in sorted(found):
        by_version.setdefault(version, []).append(found[version, number])
    return by_version


def cut_texts(groups: Sequence[Group], chars: int = TEXTS_CHARS) -> Iterator[Group]:
    """The groups with at most `chars` characters of text in all: the longest are cut, to one length."""
    lengths = [len(one.text) for group in groups for one in _messages(group)]
    longest = _longest(lengths, chars)
    for group in groups:
        if all(len(one.text) <= longest for one in _messages(group)):
            yield group
        else:
            yield _cut(group, longest)


def _messages(group: Group) -> Iterator[Message]:
    yield from group.prompt
    for sample in group.samples:
        yield from sample.completion


def _longest(lengths: Sequence[int], total: int) -> int:
    """The length to which the longest are cut, so that all together are at most `total`."""
    left = total
    for place, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - place)
        if length > share:
            return share
        left -= length
    return max(lengths, default=0)


def _cut(group: Group, longest: int) -> Group:
    samples = []
    for one in group.samples:
        whole = all(len(message.text) <= longest for message in one.completion)
        cut = [_cut_message(message, longest) for message in one.completion]
        samples.append(one if whole else replace(one, completion=cut, handed_over_chars=[]))
    return Group([_cut_message(message, longest) for message in group.prompt], samples)


def _cut_message(one: Message, longest: int) -> Message:
    if len(one.text) <= longest:
        return one
    before, after = longest - longest // 2, longest // 2
    end = one.text[len(one.text) - after :]
    return Message(one.text[:before] + end, one.role, len(one.text) - longest, after, one.tokens)


def _lines(data: bytes, key: str) -> Iterator[bytes]:
    """Unpack line by line, so that a small object cannot fill the memory."""
    rest, unpacked = b"", 0
    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as pieces:
            while piece := pieces.read(_PIECE_BYTES):
                unpacked += len(piece)
                if unpacked > OBJECT_BYTES_MAX:
                    raise Corrupt(f"{key}: more than {OBJECT_BYTES_MAX} bytes", "it was not written by grpo-orch")
                *lines, rest = (rest + piece).split(b"\n")
                yield from lines
    except zstandard.ZstdError as error:
        raise Corrupt(f"{key}: {error}", "it was damaged, or its write was cut off") from error


def _groups(lines: Iterator[bytes], head: Head, key: str) -> Iterator[Group]:
    count = 0
    for line in lines:
        count += 1
        yield from_json(line, Group, key)
    if count != head.groups:
        raise Corrupt(f"{key}: {count} of {head.groups} groups", "it was damaged, or its write was cut off")
