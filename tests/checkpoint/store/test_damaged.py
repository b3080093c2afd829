"""A damaged document of the store is Corrupt, which names it: no reader meets its content as another error."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.journal import Record
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.records.evaluations import read_completions
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import from_json, to_json
from grpo_orch.checkpoint.store.errors import Corrupt
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream.catalog import Catalog, Checkpoint, Revision
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.serving.wire import Completion
from tests.checkpoint.store.test_unreadable import BEAT
from tests.stand_ins.world import spec

names = itertools.count()
CHECKPOINT = Checkpoint("0", "checkpoints/0000/00000002-ab.json", "d", 1.0, 10)
RUN = to_json(RunRecord(documents.SCHEMA, "sim-0", 1.0, spec()))
COMPLETION = Completion(0, [1], [-0.5], "stop", "0-2", "rollout-0-i1")


def store_with(key: str, data: bytes) -> Store:
    store = Store(f"memory://damaged-{next(names)}", retry_s=0.0)
    store.put(key, data)
    return store


@pytest.mark.parametrize(
    ("key", "data", "read"),
    [
        (
            layout.catalog_revision(1),
            to_json(Revision(number=1, checkpoints=[CHECKPOINT])),
            lambda s: Catalog(s, "w").newest(),
        ),
        (layout.timeline(1), to_json(Fork(1, "0")), documents.read_forks),
        (layout.journal_entry(1), to_json(Record(1, 1, 1, "w", "n", 1.0, [{"type": []}])), journal.recover),
        (layout.RUN, RUN.replace(b'"sim-0"', b'"\xff"'), documents.read_run),
        (layout.RUN, b"{", documents.read_run),
        (layout.CONTROLLER, b"{", documents.CONTROLLER.read),
        (layout.TRAINER, to_json(BEAT).replace(b'"step":4', b'"step":4' + b"0" * 20), documents.TRAINER.read),
    ],
)
def test_document_with_impossible_content_is_corrupt(
    key: str, data: bytes, read: Callable[[Store], object]
) -> None:
    with pytest.raises(Corrupt):
        read(store_with(key, data))


def test_digits_in_a_text_are_no_integer() -> None:
    text = "7" * 64
    assert from_json(to_json({"digest": text, "size": 2**63}), dict[str, str | int], "k") == {
        "digest": text,
        "size": 2**63,
    }


@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b"{}", to_json([COMPLETION]).replace(b"stop", b"\xff")])
def test_kept_completions_that_are_damaged_are_made_again(data: bytes) -> None:
    digest = "d" * 8
    assert read_completions(store_with(layout.kept_part(digest, (0, 1, 1), 0, 1), data), digest) == {}
