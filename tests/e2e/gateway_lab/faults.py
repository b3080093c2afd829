"""What befalls a rollout node: processes killed and stopped, packets lost, a machine that starts anew."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from tests.budget import until
from tests.e2e.gateway_lab.node import Node


@dataclass(frozen=True)
class Fault:
    """Something that befalls a node.

    Args:
        hold: the node meets it for the block; what heals has healed after it.
        heals: after the block the node is as it was.
        serves_on: the node's HTTP server goes on answering.
    """

    name: str
    hold: Callable[[Node], AbstractContextManager[None]]
    heals: bool = False
    serves_on: bool = False


@contextmanager
def _stopped(pid: int | None) -> Iterator[None]:
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def _engine_killed(node: Node) -> Iterator[None]:
    os.kill(node.engine(), signal.SIGKILL)
    yield


@contextmanager
def _server_killed(node: Node) -> Iterator[None]:
    """The agent's next server, on base weights, has the same port, which is the only free one for a listener.

    Linux gives ports of one parity to listeners and those of the other, the first port's, to clients.
    """
    server, port = node.server(), node.serves_at()
    assert server is not None
    usual = node.port.get("ip_local_port_range")
    with _stopped(node.agent()):
        os.kill(server, signal.SIGKILL)
        until("the port is free", lambda: node.port.free(port))
        node.port.set("ip_local_reserved_ports", ",".join(str(other) for other in range(port - 18, port, 2)))
        node.port.set("ip_local_port_range", f"{port - 19} {port}")
    until("another server", lambda: node.server() not in (None, server))
    node.port.set("ip_local_port_range", usual)
    node.port.set("ip_local_reserved_ports", "\n")
    assert node.serves_at() == port
    yield


@contextmanager
def _forgotten(node: Node) -> Iterator[None]:
    """The machine starts anew behind a cable that is out: the gateway is not told that its connections are
    void."""
    node.port.set("tcp_orphan_retries", "1")
    with node.port.cut():
        node.end()
        until("no connection on that side", lambda: not node.port.connected())
    yield
    node.start()


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("packets lost", lambda node: node.port.lost(), heals=True),
        Fault("cable out", lambda node: node.port.cut(), heals=True),
        Fault("server stopped", lambda node: _stopped(node.server()), heals=True),
        Fault("engine stopped", lambda node: _stopped(node.engine()), heals=True, serves_on=True),
        Fault("server killed", _server_killed),
        Fault("engine killed", _engine_killed),
        Fault("half-open", _forgotten),
    )
}
