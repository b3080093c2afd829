"""TLS for browsers, where the page is served on another address than this machine's own.

The run's parties know each other by an Ed25519 certificate (`checkpoint.security.identity`), which browsers do not
take. So this is another key, from the same secret: it is the same at each start, and a browser that was told once
to trust it does so until the run's end. It keeps the secret off the wire; that the server is the right one shows
in the fingerprint, which `grpo-orch web` prints.
"""

from __future__ import annotations

import os
import ssl
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_KEY_INFO = b"grpo-orch web key 1"
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256
_NOT_BEFORE = datetime(2000, 1, 1, tzinfo=UTC)
_NOT_AFTER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def browser_context(secret: str) -> ssl.SSLContext:
    """Serves browsers, which show no certificate of their own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    key = _key(secret)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with os.fdopen(os.memfd_create("certificate"), "wb", buffering=0) as memory:  # ssl reads keys from files alone
        memory.write(private + certificate(secret).public_bytes(Encoding.PEM))
        context.load_cert_chain(f"/proc/self/fd/{memory.fileno()}")
    return context


def certificate(secret: str) -> x509.Certificate:
    """The same bytes at each start: its signature is deterministic (RFC 6979)."""
    key, name = _key(secret), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "grpo-orch web")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, _NOT_BEFORE, _NOT_AFTER)
    return builder.sign(key, SHA256(), ecdsa_deterministic=True)


def fingerprint(secret: str) -> str:
    """SHA-256 of the certificate, as browsers show it."""
    return certificate(secret).fingerprint(SHA256()).hex(":").upper()


def _key(secret: str) -> ec.EllipticCurvePrivateKey:
    seed = HKDF(SHA256(), length=48, salt=None, info=_KEY_INFO).derive(secret.encode())
    return ec.derive_private_key(1 + int.from_bytes(seed) % (_ORDER - 1), ec.SECP256R1())
