"""run.json, vouched for by the run's secret.

It names code, shell commands and folders: whoever can write it could have a run's machines do anything. So the
controller, which knows the run and its secret, stores a MAC over its bytes beside it, and no machine acts on a
run.json that does not match. So access to the store does not allow running code on a machine.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from checkpoint.records.documents import RunRecord, decode_run, run_bytes
from checkpoint.store import layout
from checkpoint.store.document import Document
from checkpoint.store.errors import Corrupt, StoreError
from checkpoint.store.run_store import Store

_KEY_INFO = b"grpo-orch run.json mac key 1"  # for nothing else: TLS has a key of its own from the same secret


class NotVouched(StoreError):
    """run.json is not what the run's secret vouches for: nothing in it may be acted upon."""


@dataclass(frozen=True, slots=True)
class Proof:
    """HMAC-SHA256 in hex over run.json's bytes, its key derived from the run's secret."""

    mac: str


PROOF = Document(layout.PROOF, Proof)


def vouch(store: Store, secret: str, data: bytes | None = None) -> None:
    """Vouch for `data` as the store's run.json; without it for what is there. Raises StoreError."""
    data = run_bytes(store) if data is None else data
    PROOF.write(store, Proof(_mac(secret, data)))


def matches(store: Store, secret: str, data: bytes) -> bool | None:
    """Whether the store's proof vouches for `data` by that secret; None without a proof. Raises Corrupt."""
    found = PROOF.read(store)
    return None if found is None else hmac.compare_digest(found.mac.encode(), _mac(secret, data).encode())


def read_vouched_run(store: Store, secret: str) -> RunRecord:
    """Return the run as the secret vouches for it. Raises NotVouched, StoreError."""
    data = run_bytes(store)
    match matches(store, secret, data):
        case None:
            hint = f"`grpo-orch resume {store.quoted}` sees to it"
            raise NotVouched(f"{store.url}/{layout.RUN} is not vouched for by the run's secret", hint)
        case False:
            raise NotVouched(*changed(store))
    return decode_run(store, data)


def changed(store: Store) -> tuple[str, str]:
    """Message and hint for a run.json that does not match its proof."""
    what = f"{store.url}/{layout.RUN} is not what the run was started with: somebody has changed it"
    return what, "put the original back, and see who can write to the store"


def _mac(secret: str, data: bytes) -> str:
    key = HKDF(SHA256(), length=32, salt=None, info=_KEY_INFO).derive(secret.encode())
    return hmac.new(key, data, hashlib.sha256).hexdigest()


# Bytes in the store that only those who know the run's secret can have written, for one place each.
#
# For what a machine would act upon as on code: whoever can write to the store can take such an object away or
# damage it, and nothing more.

_SEAL_KEY_INFO = b"grpo-orch sealed object mac key 1"  # for nothing else
MAC_BYTES = 32


def seal(secret: str, place: str, content: bytes) -> bytes:
    """HMAC-SHA256 over the place and the content, then the content."""
    return _seal_mac(secret, place, content) + content


def unseal(secret: str, place: str, sealed: memoryview) -> memoryview:
    """The content that was sealed for that very place. Raises Corrupt."""
    mac, content = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
    if not hmac.compare_digest(mac, _seal_mac(secret, place, content)):
        raise Corrupt(f"{place}: the run's secret does not vouch for it")
    return content


def _seal_mac(secret: str, place: str, content: bytes | memoryview) -> bytes:
    key = HKDF(SHA256(), length=32, salt=None, info=_SEAL_KEY_INFO).derive(secret.encode())
    mac = hmac.new(key, hashlib.sha256(place.encode()).digest(), hashlib.sha256)
    mac.update(content)
    return mac.digest()
