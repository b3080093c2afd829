"""The certificate that every party of a run makes for itself, and which addresses require it."""

from __future__ import annotations

import contextlib
import hashlib
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from grpo_orch.checkpoint.security import identity
from tests.e2e.harness import ROOT
from tests.e2e.tiny import NODE_PYTHON

SECRET = "the-run's-secret"
# Parties of one run may have other versions of Python and of cryptography: if this changes, they do not meet.
DIGEST = "98c952b9f5979c931e016f2735050c665cbf3634da7f27decbd1039ac8cee976"


def pem_of(secret: str, folder: Path) -> bytes:
    identity.write_pem(secret, folder / "identity.pem")
    return (folder / "identity.pem").read_bytes()


@pytest.mark.parametrize("python", [sys.executable, str(NODE_PYTHON)])
def test_every_environment_makes_the_same_from_the_same_secret(tmp_path: Path, python: str) -> None:
    program = "import sys; from grpo_orch.checkpoint.security import identity; from pathlib import Path\n"
    program += "identity.write_pem(sys.argv[1], Path(sys.argv[2]))"
    path = tmp_path / "identity.pem"
    subprocess.run([python, "-c", program, SECRET, str(path)], check=True, cwd=ROOT)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == DIGEST


def test_another_secret_makes_another_key_and_no_secret_is_in_it(tmp_path: Path) -> None:
    mine, other = pem_of(SECRET, tmp_path), pem_of(f"{SECRET} ", tmp_path)
    mine_key, _, mine_certificate = mine.partition(b"-----BEGIN CERTIFICATE")
    other_key, _, other_certificate = other.partition(b"-----BEGIN CERTIFICATE")
    assert mine_key != other_key
    assert mine_certificate != other_certificate
    assert SECRET.encode() not in x509.load_pem_x509_certificate(mine).public_bytes(Encoding.DER)


def test_the_file_is_for_its_owner_alone_whatever_was_there(tmp_path: Path) -> None:
    path, bait = tmp_path / "identity.pem", tmp_path / "bait"
    bait.write_text("")
    path.symlink_to(bait)
    identity.write_pem(SECRET, path)
    assert (path.stat().st_mode & 0o777, bait.read_text()) == (0o600, "")
    path.chmod(0o644)
    identity.write_pem(SECRET, path)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("host", "under_tls"),
    [
        *[("127.0.0.1", False), ("127.8.9.10", False), ("::1", False), ("localhost", False)],
        *[("10.1.2.3", True), ("192.168.0.1", True), ("203.0.113.7", True), ("0.0.0.0", True)],
        *[("fd00::1", True), ("::", True), ("localhost.example.com", True), ("", True)],
    ],
)
def test_every_address_but_loopback_is_under_tls(host: str, under_tls: bool) -> None:
    assert identity.protects(host) is under_tls
    assert identity.url(host, 80).startswith("https://" if under_tls else "http://")


def test_addresses_are_written_as_urls_write_them() -> None:
    assert identity.url("10.1.2.3", 8000) == "https://10.1.2.3:8000"
    assert identity.url("fd00::1", 8000) == "https://[fd00::1]:8000"
    assert identity.address("::1", 8000) == "[::1]:8000"


@pytest.mark.parametrize("make", [identity.server_context, identity.client_context])
def test_both_sides_demand_a_certificate_and_the_newest_tls(make: Callable[[str], ssl.SSLContext]) -> None:
    context = make(SECRET)
    assert (context.verify_mode, context.minimum_version) == (ssl.CERT_REQUIRED, ssl.TLSVersion.TLSv1_3)
    assert len(context.get_ca_certs()) == 0, "the run's certificate is no authority over others"
    assert context.cert_store_stats()["x509"] == 1, "it is the only one that is trusted"


def test_an_ordinary_client_can_be_told_the_name_and_check_it_strictly(tmp_path: Path) -> None:
    """As OpenSSL's command line, curl and later versions of Python do by default."""
    pem_of(SECRET, tmp_path)
    client = ssl.create_default_context(cafile=str(tmp_path / "identity.pem"))
    client.load_cert_chain(tmp_path / "identity.pem")
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    from_server, from_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = client.wrap_bio(from_server, from_client, server_hostname=identity.NAME)
    ours = identity.server_context(SECRET).wrap_bio(from_client, from_server, server_side=True)
    for side in (theirs, ours, theirs):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    ours.do_handshake()
    assert ours.getpeercert() == theirs.getpeercert() != {}
