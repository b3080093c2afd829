"""A network for a gateway and its nodes: a namespace for each, and cables to one switch. Nothing of it is outside.

A node's cable can be out, and its packets can be lost while the cable looks well: nobody is told with a reset.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.rigs.sky import network

GATEWAY = "10.77.0.1"
_SWITCH = f"""
link set lo up
link add name switch type bridge forward_delay 0
address add {GATEWAY}/24 dev switch
link set switch up
"""
_TRIAL = "ip link add name trial type bridge && ip link add name end type veth peer name other-end"


def missing() -> str:
    """Why there can be no such network here; nothing if it can."""
    if os.geteuid():
        return "it needs root"
    if programs := [name for name in ("ip", "ss", "unshare") if shutil.which(name) is None]:
        return f"{', '.join(programs)} not installed: run `make test-packages`"
    trial = subprocess.run(["unshare", "--net", "sh", "-c", _TRIAL], capture_output=True, text=True, check=False)
    return f"no network namespaces: {' '.join(trial.stderr.split())}" if trial.returncode else ""


class Port:
    """A node's place in the network."""

    def __init__(self, switch: str, number: int) -> None:
        self.host = f"10.77.0.{10 + number}"
        self._switch, self._cable = switch, f"port{number}"
        self.name = f"{switch}-{number}"
        subprocess.run(["ip", "netns", "add", self.name], check=True)
        cable = f"link add name {self._cable} type veth peer name eth0 netns {self.name}"
        _ip(switch, f"{cable}\nlink set {self._cable} master switch up")
        address = f"address add {self.host}/24 dev eth0\nlink set eth0 up\nroute add default via {GATEWAY}"
        _ip(self.name, f"link set lo up\n{address}")
        self.set("tcp_max_tw_buckets", "0")  # a port is free as soon as nobody has it

    def inside(self) -> AbstractContextManager[None]:
        """The calling thread is there for the block, with what it starts."""
        return network.inside(self.name)

    def pids(self) -> list[int]:
        return network.pids(self.name)

    def get(self, setting: str) -> str:
        """What is below net/ipv4 there; see ip-sysctl in the kernel's documentation."""
        with self.inside():
            return Path(f"/proc/sys/net/ipv4/{setting}").read_text()

    def set(self, setting: str, value: str) -> None:
        """Change it."""
        with self.inside():
            Path(f"/proc/sys/net/ipv4/{setting}").write_text(value)

    def free(self, port: int) -> bool:
        """Whether a listener could have the port."""
        with self.inside(), socket.socket() as sock:
            try:
                sock.bind((self.host, port))
            except OSError:
                return False
        return True

    @contextmanager
    def cut(self) -> Iterator[None]:
        """The cable is out for the block."""
        _ip(self._switch, f"link set {self._cable} down")
        try:
            yield
        finally:
            _ip(self._switch, f"link set {self._cable} up")

    @contextmanager
    def lost(self) -> Iterator[None]:
        """Every packet is lost for the block, in both directions."""
        _ip(self._switch, f"link set {self._cable} nomaster")
        try:
            yield
        finally:
            _ip(self._switch, f"link set {self._cable} master switch")

    def connected(self) -> bool:
        """Whether a connection to another machine is left there, as that one's kernel sees it."""
        with self.inside():
            listed = subprocess.run(
                ["ss", "-tanH", "dst", f"{GATEWAY}/24"], capture_output=True, text=True, check=True
            )
        return bool(listed.stdout.strip())


class Net:
    """The network, with a port for each node. The gateway's place is the switch itself."""

    def __init__(self, nodes: int) -> None:
        self._name = f"gateway-{os.getpid()}-{time.monotonic_ns() % 10_000}"
        subprocess.run(["ip", "netns", "add", self._name], check=True)
        _ip(self._name, _SWITCH)
        self.ports = [Port(self._name, number) for number in range(nodes)]

    def inside(self) -> AbstractContextManager[None]:
        """The calling thread is where the gateway is, with what it starts."""
        return network.inside(self._name)

    def remove(self) -> None:
        """Kill all who are in it, and take it down. Not to be called from inside."""
        for name in [*(port.name for port in self.ports), self._name]:
            network.remove(name)


def _ip(namespace: str, commands: str) -> None:
    subprocess.run(["ip", "-netns", namespace, "-batch", "-"], input=commands, text=True, check=True)
