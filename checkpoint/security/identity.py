"""TLS between trainer, gateway and nodes, with a certificate that is derived from the run's secret.

Each party derives the same key and certificate from the secret, presents the certificate, and trusts no other. So
certificates are not issued, sent, stored or renewed: knowing the secret is the proof of identity. A peer without
it is refused in the TLS handshake, before any HTTP (decision 011).
"""

from __future__ import annotations

import os
import ssl
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# Everyone who connects sees the certificate, so it does not name the product. Some clients require a name; ours
# ignore it, because addresses change and the key is sufficient proof.
NAME = "run.internal"
_KEY_INFO = b"grpo-orch tls key 1"
# The certificate never expires, so that connections do not depend on correct clocks.
_NOT_BEFORE = datetime(2000, 1, 1, tzinfo=UTC)
NOT_AFTER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # RFC 5280: no end


def protects(host: str) -> bool:
    """Whether connections to this address use TLS: all except loopback."""
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def url(host: str, port: int) -> str:
    """Return the base URL of a server at this address."""
    return f"{'https' if protects(host) else 'http'}://{address(host, port)}"


def address(host: str, port: int) -> str:
    """Return host and port in the notation of URLs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def server_context(secret: str) -> ssl.SSLContext:
    """Return the context of a server that accepts only clients that know the secret."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, secret)
    context.num_tickets = 0  # no session resumption: every connection is authenticated
    return context


def client_context(secret: str) -> ssl.SSLContext:
    """Return the context of a client that accepts only servers that know the secret."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, secret)


def write_pem(secret: str, path: Path) -> None:
    """Write key and certificate into one file of mode 0600, for programs that read them from a file."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(_pem(secret))


def _context(protocol: int, secret: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    with os.fdopen(os.memfd_create("identity"), "wb", buffering=0) as memory:  # ssl reads keys only from files
        memory.write(_pem(secret))
        path = f"/proc/self/fd/{memory.fileno()}"
        context.load_cert_chain(path)
        context.load_verify_locations(path)
    return context


def _pem(secret: str) -> bytes:
    seed = HKDF(SHA256(), length=32, salt=None, info=_KEY_INFO).derive(secret.encode())
    key = Ed25519PrivateKey.from_private_bytes(seed)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private + _certificate(key).public_bytes(Encoding.PEM)


def _certificate(key: Ed25519PrivateKey) -> x509.Certificate:
    """Return the self-signed certificate. Ed25519 signatures are deterministic."""
    public, name = key.public_key(), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    both_ways = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = (
        x509.CertificateBuilder(name, name, public, 1, _NOT_BEFORE, NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(both_ways, critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
    )
    return builder.sign(key, algorithm=None)
