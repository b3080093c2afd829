"""The run's certificate, and mutual TLS between the real libraries of trainer, gateway and node: who belongs to
the run is served, strangers are told nothing, and no stranger is told the run's secret.

0.0.0.0 is an address that is not loopback, and that Linux connects to this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import GatewayAddress
from grpo_orch.checkpoint.security import identity
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.gateway.nodes.connection import Pool
from grpo_orch.policies.model.spec import Dataset, RolloutSpec, RunSpec, TrainerSpec
from grpo_orch.policies.serving.wire import Announce
from grpo_orch.policies.tick.snapshot import Trainer
from grpo_orch.tasks.completions.gateway_client import GatewayClient, GenerationFailed
from grpo_orch.tasks.machine.node_env import NodeEnv
from grpo_orch.tasks.rollout.gateway_link import GatewayLink, GatewayUnreachable
from grpo_orch.tasks.rollout.vllm.flags import argv_of
from grpo_orch.tasks.storing.heartbeat import Heartbeat
from tests.budget import HANG_S, until
from tests.e2e.harness import ROOT
from tests.e2e.tiny import NODE_PYTHON
from tests.rigs.gateway_process import TOKEN, Rig, check_complete, make_batch
from tests.stand_ins.strangers import check_closed

HOST = "0.0.0.0"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, HOST)
    yield rig
    rig.stop()


def test_run_under_tls_completes_and_rejects_strangers(rig: Rig) -> None:
    rig.gateway()
    assert rig.url.startswith("https://")
    rig.node("rollout-0", host=HOST)
    rig.node("rollout-1")  # one beside the gateway, on loopback
    rig.until_members("rollout-0", "rollout-1")
    batch = make_batch("0-0", requests=64)
    check_complete(batch, rig.complete(batch))
    assert all(rig.seen(node) for node in ("rollout-0", "rollout-1"))
    check_closed(HOST, urlsplit(rig.url).port or 0, TOKEN)


async def answer(scope: dict[str, Any], _receive: object, send: Any) -> None:
    """Served in the place of vLLM's app."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"up"})


def test_server_below_vllm_rejects_strangers_with_node_flags(tmp_path: Path) -> None:
    identity.write_pem(TOKEN, tmp_path / "identity.pem")
    trainer = TrainerSpec(model="model", dataset=Dataset(path="json"), reward_funcs=())
    spec = RunSpec(name="t", storage="memory://t", trainer=trainer, grpo={}, workdir="", rollout=RolloutSpec())
    given = argv_of(spec, HOST, 1, tmp_path / "identity.pem")
    flags = [word for pair in pairwise(given) if pair[0].startswith("--ssl-") for word in pair]
    assert len(flags) == 8
    # vLLM hands them to uvicorn, where they have the same names.
    argv = [
        str(NODE_PYTHON),
        "-m",
        "uvicorn",
        "tests.checkpoint.security.test_tls:answer",
        "--host",
        HOST,
        "--port",
        "0",  # one that is free, and that it names
        *flags,
    ]
    log = tmp_path / "uvicorn.log"
    with log.open("wb") as out:
        server = subprocess.Popen(argv, cwd=ROOT, stderr=out)
    try:
        found = until("uvicorn", lambda: re.search(rb" running on https://[\d.]+:(\d+)", log.read_bytes()))
        check_closed(HOST, int(found[1]), TOKEN)
    finally:
        server.kill()
        server.wait()


class Imposter:
    """Listens at a party's address, shows its own certificate, and accepts every client."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        if tls is not None:
            tls.verify_mode = ssl.CERT_NONE
        self._tls = tls
        self._listening = socket.create_server((HOST, 0))
        self.port = self._listening.getsockname()[1]
        self.heard = b""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:  # closed
                return
            with contextlib.suppress(OSError), sock:
                sock.settimeout(HANG_S)
                with sock if self._tls is None else self._tls.wrap_socket(sock, server_side=True) as shown:
                    self.heard += shown.recv(65536)

    def close(self) -> None:
        self._listening.close()


def ask_as_the_trainer(port: int, folder: Path) -> None:
    store = Store(f"file://{folder}/store")
    documents.gateway((0, 1, 1)).write(store, GatewayAddress(identity.url(HOST, port), "boot"))
    beat = Heartbeat(store, Trainer("trainer-0-i1", 1, 0, 0, 0, "starting", 0.0))
    with pytest.raises(GenerationFailed, match="no token"):
        GatewayClient(store, TOKEN, beat).complete(make_batch("0-0", deadline_s=0.1))


def ask_as_a_node(port: int, folder: Path) -> None:
    store = Store(f"file://{folder}/store")
    documents.gateway((0, 1, 1)).write(store, GatewayAddress(identity.url(HOST, port), "boot"))
    env = NodeEnv(store.url, "rollout-0", TOKEN, attempt=1, timeline=0, workdir=str(folder), host=HOST)

    async def announce() -> None:
        tls = aiohttp.TCPConnector(ssl=identity.client_context(TOKEN))
        async with aiohttp.ClientSession(connector=tls) as http:
            said = Announce("boot", f"{HOST}:1", None, 1)
            with pytest.raises(GatewayUnreachable):
                await GatewayLink(store, env, http).announce("rollout-0", said, asyncio.Event())

    asyncio.run(announce())


class Nobody:
    """Waits for the end of an answer, whatever it is."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    def head(self, status: int) -> None: ...
    def body(self, data: bytes) -> None: ...
    def end(self) -> None:
        self.over.set()

    def lost(self, _why: str) -> None:
        self.over.set()


def ask_as_the_gateway(port: int, _folder: Path) -> None:
    async def ask() -> None:
        pool = Pool(identity.address(HOST, port), identity.client_context(TOKEN))
        with contextlib.suppress(OSError):
            connection, receiver = await pool.connect(HANG_S), Nobody()
            connection.send([f"GET / HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()], receiver)
            await receiver.over.wait()

    asyncio.run(ask())


@pytest.mark.parametrize("ask", [ask_as_the_trainer, ask_as_a_node, ask_as_the_gateway])
def test_stranger_does_not_learn_the_secret(ask: Callable[[int, Path], None], tmp_path: Path) -> None:
    told = {}
    shown = {
        "nothing": None,
        "another run's": identity.server_context(f"{TOKEN}, nearly"),
        "the run's": identity.server_context(TOKEN),
    }
    for certificate, tls in shown.items():
        imposter = Imposter(tls)
        ask(imposter.port, tmp_path)
        imposter.close()
        told[certificate] = TOKEN.encode() in imposter.heard
    assert told == {"nothing": False, "another run's": False, "the run's": True}


# The certificate that every party of a run makes for itself, and which addresses require it.

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


def test_key_file_is_private_even_over_an_existing_one(tmp_path: Path) -> None:
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


def test_ordinary_client_can_check_the_name_strictly(tmp_path: Path) -> None:
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
