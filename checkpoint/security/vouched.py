"""Authenticate run.json with the run's secret.

run.json names code, shell commands and folders, so its writer could run anything on the run's machines. Therefore
the controller, which knows the run and its secret, stores a MAC of its bytes next to it, and machines refuse a
run.json that does not match. Access to the store alone does not allow running code on a machine.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from grpo_orch.checkpoint.records.documents import RunRecord, decode_run, run_bytes
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.document import Document
from grpo_orch.checkpoint.store.errors import Corrupt, StoreError
from grpo_orch.checkpoint.store.run_store import Store

_KEY_INFO = b"grpo-orch run.json mac key 1"  # only for this; TLS derives another key from the same secret


class UntrustedRun(StoreError):
    """run.json does not match its MAC by the run's secret, or has none. It must not be used."""


@dataclass(frozen=True, slots=True)
class Proof:
    """HMAC-SHA256, in hex, of run.json, with a key derived from the run's secret. Written by the controller."""

    mac: str


PROOF = Document(layout.PROOF, Proof)


def sign_run(store: Store, secret: str, data: bytes | None = None) -> None:
    """Store the MAC of `data`, by default the stored run.json. Raises StoreError."""
    data = run_bytes(store) if data is None else data
    PROOF.write(store, Proof(_mac(secret, data)))


def matches(store: Store, secret: str, data: bytes) -> bool | None:
    """Whether the stored MAC matches `data` and the secret; None without a MAC. Raises Corrupt."""
    found = PROOF.read(store)
    return None if found is None else hmac.compare_digest(found.mac.encode(), _mac(secret, data).encode())


def read_signed_run(store: Store, secret: str) -> RunRecord:
    """Read and authenticate run.json. Raises UntrustedRun, StoreError."""
    data = run_bytes(store)
    match matches(store, secret, data):
        case None:
            hint = f"add it with `grpo-orch resume {store.quoted}`"
            raise UntrustedRun(f"{store.url}/{layout.RUN} has no MAC by the run's secret", hint)
        case False:
            raise UntrustedRun(*changed(store))
    return decode_run(store, data)


def changed(store: Store) -> tuple[str, str]:
    """Return message and hint for a run.json that does not match its MAC."""
    message = f"{store.url}/{layout.RUN} was changed after the run was started"
    return message, "restore the original, and check who can write to the store"


def _mac(secret: str, data: bytes) -> str:
    key = HKDF(SHA256(), length=32, salt=None, info=_KEY_INFO).derive(secret.encode())
    return hmac.new(key, data, hashlib.sha256).hexdigest()


# Sealed objects: authenticated with the run's secret, each for one place in the store.
#
# Used for objects that a machine runs like code: with access to the store alone, such an object can be deleted or
# damaged, but not replaced.

_SEAL_KEY_INFO = b"grpo-orch sealed object mac key 1"  # only for this
MAC_BYTES = 32


def seal(secret: str, place: str, content: bytes) -> bytes:
    """Return the HMAC-SHA256 of place and content, followed by the content."""
    return _seal_mac(secret, place, content) + content


def unseal(secret: str, place: str, sealed: memoryview) -> memoryview:
    """Return the content that was sealed for that place. Raises Corrupt."""
    mac, content = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
    if not hmac.compare_digest(mac, _seal_mac(secret, place, content)):
        raise Corrupt(f"{place}: its MAC does not match the run's secret")
    return content


def _seal_mac(secret: str, place: str, content: bytes | memoryview) -> bytes:
    key = HKDF(SHA256(), length=32, salt=None, info=_SEAL_KEY_INFO).derive(secret.encode())
    mac = hmac.new(key, hashlib.sha256(place.encode()).digest(), hashlib.sha256)
    mac.update(content)
    return mac.digest()
