"""Nodes that fetch from each other: the store is read about once, and whatever a peer does costs no content."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from checkpoint.security import identity
from checkpoint.store.run_store import Store
from orchestrator.gateway.routing.peers import PeerAddresses
from policies.serving.spreading import in_turn
from policies.serving.wire import PEERS_SILENT_S
from tasks.machine.node_env import NodeEnv
from tasks.peers.peers import Peers, may_pay
from tasks.rollout.gateway_link import GatewayLink, GatewayUnreachable, meet
from tests.rigs.gateway_process import TOKEN
from tests.rigs.gateway_process import Rig as GatewayRig
from tests.tasks.peers.rig import CHUNKS, Rig, nodes

HOSTS = ["127.0.0.1", "0.0.0.0"]  # plain, and under mutual TLS: the latter is not loopback, and is this machine


@pytest.fixture(params=HOSTS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return Rig(tmp_path, request.param)


def test_a_node_that_is_alone_reads_the_store_once_and_asks_nobody(rig: Rig) -> None:
    with nodes(1, rig.host) as found:
        rig.fetch(0, found[0])
    assert len(rig.store.read) == CHUNKS


def test_ten_nodes_at_once_read_the_store_once(rig: Rig) -> None:
    with nodes(10, rig.host) as found:
        rig.fetch_together(found)
    assert rig.read == sorted(rig.policy.chunks)


def test_where_nothing_can_listen_a_node_is_alone(tmp_path: Path) -> None:
    rig = Rig(tmp_path, f"{64 * 'a'}.no-host-name")  # no label is longer than 63
    with nodes(1, rig.host) as found:
        assert found[0].address == ""
        rig.fetch(0, found[0])
    assert len(rig.store.read) == CHUNKS


def test_a_node_that_comes_later_gets_everything_from_the_others(rig: Rig) -> None:
    with nodes(3, rig.host) as found:
        rig.fetch_together(found[:2])
        rig.store.read.clear()
        rig.fetch(2, found[2])
    assert rig.store.read == []


def test_when_one_goes_only_its_own_parts_change_hands() -> None:
    names, parts = [f"10.0.0.{number}:1" for number in range(10)], [str(number) for number in range(2000)]
    first = {part: in_turn(part, names)[0] for part in parts}
    assert all(100 < sum(1 for one in first.values() if one == name) < 300 for name in names)
    left = {part: in_turn(part, reversed(names[1:]))[0] for part in parts}
    assert all(left[part] == first[part] for part in parts if first[part] != names[0])


def test_the_gateway_tells_each_node_where_the_others_are_before_they_are_members(tmp_path: Path) -> None:
    gateway = GatewayRig(tmp_path, "127.0.0.1")

    async def ask() -> list[list[str]]:
        tls = aiohttp.TCPConnector(ssl=identity.client_context(TOKEN))
        async with aiohttp.ClientSession(connector=tls) as http:
            links = [link(number, http) for number in range(3)]
            told = [await one.ask_peers(f"10.0.0.{number}:1") for number, one in enumerate(links)]
            told.append(await links[0].ask_peers("10.0.0.7:1"))  # it has started again
            told.append(await links[1].ask_peers("10.0.0.1:1"))
            with pytest.raises(GatewayUnreachable, match="expected HOST:PORT"):
                await links[1].ask_peers("http://elsewhere/")
            return told

    def link(number: int, http: aiohttp.ClientSession) -> GatewayLink:
        env = NodeEnv(gateway.store.url, f"rollout-{number}", TOKEN, 1, 0, str(tmp_path), "127.0.0.1")
        return GatewayLink(Store(env.run), env, http)

    try:
        gateway.gateway()
        told = asyncio.run(ask())
    finally:
        gateway.stop()
    first, second, third, again = (f"10.0.0.{number}:1" for number in (0, 1, 2, 7))
    assert told == [[], [first], [first, second], [second, third], [again, third]]


class Introduced(Peers):
    """Notes that it knows somebody."""

    def __init__(self) -> None:
        super().__init__("0.0.0.0", TOKEN)
        self.met = asyncio.Event()

    def know(self, addresses: Iterable[str]) -> list[Future[None]]:
        addresses = list(addresses)
        if addresses:
            self.met.set()
        return super().know(addresses)


def test_an_agent_learns_of_the_others_from_the_gateway_and_fetches_from_them(tmp_path: Path) -> None:
    gateway, rig = GatewayRig(tmp_path, "127.0.0.1"), Rig(tmp_path, "0.0.0.0")

    async def fetch() -> None:
        tls = aiohttp.TCPConnector(ssl=identity.client_context(TOKEN))
        first, second = Introduced(), Introduced()
        with first, second:
            async with aiohttp.ClientSession(connector=tls) as http, asyncio.TaskGroup() as group:
                envs = [NodeEnv(gateway.store.url, f"rollout-{at}", TOKEN, 1, 0, "", "0.0.0.0") for at in range(2)]
                links = [GatewayLink(gateway.store, env, http) for env in envs]
                met = [group.create_task(meet(*pair)) for pair in zip((first, second), links, strict=True)]
                await asyncio.gather(first.met.wait(), second.met.wait())
                await asyncio.to_thread(rig.fetch, 0, first)
                rig.store.read.clear()
                await asyncio.to_thread(rig.fetch, 1, second)
                for task in met:
                    task.cancel()

    try:
        gateway.gateway()
        asyncio.run(fetch())
    finally:
        gateway.stop()
    assert rig.store.read == []


def test_who_has_said_nothing_for_long_is_told_to_nobody() -> None:
    told = PeerAddresses()
    assert told.tell("a", "10.0.0.1:1", 0.0) == []
    assert told.tell("b", "10.0.0.2:1", PEERS_SILENT_S - 1) == ["10.0.0.1:1"]
    assert told.tell("b", "10.0.0.2:1", PEERS_SILENT_S + 1) == []


@pytest.mark.parametrize(
    ("url", "options", "host", "pays"),
    [
        ("s3://bucket/run", {}, "10.0.0.1", False),
        ("s3://bucket/run", {"region": "eu-west-1"}, "10.0.0.1", False),
        ("s3://bucket/run", {"endpoint": "https://s3.eu-west-1.amazonaws.com"}, "10.0.0.1", False),
        ("s3://bucket/run", {"endpoint": "http://minio:9000"}, "10.0.0.1", True),
        ("s3://bucket/run", {"AWS_ENDPOINT_URL": "http://minio:9000"}, "10.0.0.1", True),
        ("s3://bucket/run", {"driver": "fsspec", "endpoint_url": "http://minio:9000"}, "127.0.0.1", True),
        ("s3://b/run", {"client_kwargs": {"endpoint_url": "http://minio:9000"}}, "10.0.0.1", True),
        ("gs://bucket/run", {}, "10.0.0.1", False),
        ("az://bucket/run", {}, "10.0.0.1", False),
        ("file:///net/runs", {}, "10.0.0.1", True),
        ("file:///tmp/runs", {}, "127.0.0.1", False),
        ("sftp://server/runs", {}, "10.0.0.1", True),
    ],
)
def test_peers_are_asked_where_the_store_has_one_network_for_all(
    url: str, options: dict[str, Any], host: str, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    assert may_pay(url, options, host) is pays
