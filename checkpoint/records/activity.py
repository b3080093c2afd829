"""What rollout machines' time went to, kept in the store: a byte a machine and minute, and one a machine and hour.

The gateway writes two kinds of objects, each anew as it grows: one of an hour in minutes, every minute, and one of
a day in hours, every ten. Whoever draws a day reads minutes, whoever draws a month reads hours. Each gateway
process has objects of its own, so that none reads before it writes; nothing depends on them.

What that is for 1,000 machines and 10,000 steps of a minute, which are 167 hours: an hour's object has 60 kB of
shares, 100 kB as JSON with the names, and 49 kB packed where shares scatter by a twentieth; 167 of them have 8 MB.
A day's has 24 kB, 7 of them 0.2 MB. That is 11,000 requests to write, 5 cents at a large cloud's prices, and
270 MB sent, for an object is on average half full. The gateway's status of as many members has 410 kB every two
seconds: 300,000 requests and 120 GB in that time. The journal gets nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import zstandard

from checkpoint.store import layout
from checkpoint.store.codec import check_schema, from_json, to_json
from checkpoint.store.errors import Corrupt
from checkpoint.store.run_store import Store
from policies.serving.activity import Counted

SCHEMA = 1
MINUTE_S, HOUR_S = 60, 3600
SLOTS = {MINUTE_S: 60, HOUR_S: 24}  # in an object, by how long a slot is
UNPACKED_BYTES_MAX = 64 * 1024 * 1024  # names included: half a million machines in an hour
_LEVEL = 3


@dataclass(frozen=True, slots=True)
class Part:
    """An hour in minutes, or a day in hours."""

    schema: int
    slot_s: int
    began_s: int  # seconds since the epoch
    machines: Mapping[str, bytes]  # a byte a slot from the beginning on, as `policies.serving.activity` packs it


def counted(slot_s: int) -> Counted:
    """An empty count in slots of that length."""
    return Counted(slot_s, SLOTS[slot_s])


def write_part(store: Store, slot_s: int, group: int, boot_id: str, machines: Mapping[str, bytes]) -> None:
    """Write what a gateway process has seen in that hour or day. Raises StoreError."""
    part = Part(SCHEMA, slot_s, group * slot_s * SLOTS[slot_s], machines)
    data = zstandard.ZstdCompressor(level=_LEVEL).compress(to_json(part))
    store.put(layout.activity(slot_s, group, boot_id), data)


def read_part(store: Store, key: str) -> Part | None:
    """Return what `write_part` wrote, or None where it is gone. Raises Corrupt."""
    data = store.get_or_none(key)
    if data is None:
        return None
    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as pieces:
            plain = pieces.read(UNPACKED_BYTES_MAX + 1)
    except zstandard.ZstdError as error:
        raise Corrupt(f"{key}: {error}", "it was damaged, or its write was cut off") from error
    if len(plain) > UNPACKED_BYTES_MAX:
        raise Corrupt(f"{key}: more than {UNPACKED_BYTES_MAX} bytes", "it was not written by grpo-orch")
    part = from_json(plain, Part, key)
    check_schema(part.schema, SCHEMA, key)
    return part
