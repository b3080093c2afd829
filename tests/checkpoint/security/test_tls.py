"""Mutual TLS between the real libraries of trainer, gateway and node: who belongs to the run is served, strangers
are told nothing, and no stranger is told the run's secret.

0.0.0.0 is an address that is not loopback, and that Linux connects to this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

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


def test_a_run_under_tls_completes_its_batches_and_its_gateway_tells_strangers_nothing(rig: Rig) -> None:
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


def test_the_server_below_vllm_tells_strangers_nothing_with_the_flags_of_a_node(tmp_path: Path) -> None:
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
                await GatewayLink(store, env, http).announce(said, asyncio.Event())

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
            connection, receiver = await pool.connect(5.0), Nobody()
            connection.send([f"GET / HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()], receiver)
            await receiver.over.wait()

    asyncio.run(ask())


@pytest.mark.parametrize("ask", [ask_as_the_trainer, ask_as_a_node, ask_as_the_gateway])
def test_who_is_not_of_the_run_is_not_told_its_secret(ask: Callable[[int, Path], None], tmp_path: Path) -> None:
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
