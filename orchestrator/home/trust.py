"""Whether the run.json in the store is the one that this machine knows, so that it may vouch for it to the nodes.

A machine that has started or steered a run keeps a digest of its run.json, where the store cannot reach it. One
that sees a run for the first time has the run's secret to judge by, if it was brought along; else it has to take
what is there: `resume` on a new machine trusts the store once.
"""

from __future__ import annotations

import os

from blake3 import blake3

from checkpoint.records import documents
from checkpoint.records.documents import RunRecord
from checkpoint.security import vouched
from checkpoint.security.vouched import NotVouched
from checkpoint.store.run_store import Store
from orchestrator.home.folder import keep_run_digest, kept_run_digest, known_token, run_digest_file, token_mark

DIGEST_ENV = "GRPO_ORCH_RUN_DIGEST"  # set for a controller machine by whoever launches it


def known_run(store: Store) -> tuple[RunRecord, bytes]:
    """Return the run in the store, and its bytes. Raises NotVouched, StoreError."""
    data = documents.run_bytes(store)
    record = documents.decode_run(store, data)
    kept = kept_run_digest(store.url) or os.environ.get(DIGEST_ENV)
    if kept:
        known = kept == run_digest(data)
    else:
        token = known_token(record.run_id)
        own = token is not None and documents.SECRET_MARK.read(store) == token_mark(token)
        known = token is None or not own or vouched.matches(store, token, data) is not False
    if not known:
        what, hint = vouched.changed(store)
        another = f"; if it is another run, of which you know, remove {run_digest_file(store.url)}"
        raise NotVouched(what, hint + (another if kept else ""))
    return record, data


def vouch(store: Store, token: str, data: bytes) -> None:
    """Vouch for the run to its machines, and recognise it from now on. Raises StoreError."""
    vouched.vouch(store, token, data)
    keep_run_digest(store.url, run_digest(data))


def run_digest(data: bytes) -> str:
    """By this a machine recognises a run.json."""
    return blake3(data).hexdigest()
