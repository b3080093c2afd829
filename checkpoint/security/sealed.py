"""Bytes in the store that only those who know the run's secret can have written, for one place each.

For what a machine would act upon as on code: whoever can write to the store can take such an object away or damage
it, and nothing more.
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from checkpoint.store.errors import Corrupt

_KEY_INFO = b"grpo-orch sealed object mac key 1"  # for nothing else
MAC_BYTES = 32


def seal(secret: str, place: str, content: bytes) -> bytes:
    """HMAC-SHA256 over the place and the content, then the content."""
    return _mac(secret, place, content) + content


def unseal(secret: str, place: str, sealed: memoryview) -> memoryview:
    """The content that was sealed for that very place. Raises Corrupt."""
    mac, content = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(secret, place, content)):
        raise Corrupt(f"{place}: the run's secret does not vouch for it")
    return content


def _mac(secret: str, place: str, content: bytes | memoryview) -> bytes:
    key = HKDF(SHA256(), length=32, salt=None, info=_KEY_INFO).derive(secret.encode())
    mac = hmac.new(key, hashlib.sha256(place.encode()).digest(), hashlib.sha256)
    mac.update(content)
    return mac.digest()
