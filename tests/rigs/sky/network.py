"""The rig's own network namespace: everything of the rig lives in it, nothing of it is seen or heard outside.

It is a router with a cable to each machine. What has no cable (yet, or no more) lies behind `sink`, where packets
vanish: a machine that lost its power, or never was, answers neither with a reset nor with "no route to host".
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

HOST_ADDRESS = "172.31.255.250"  # of the rig's host side, for the machines
METADATA_ADDRESS = "169.254.169.254"
PRIVATE_NETWORK = "172.31.0.0/16"  # of an account's default VPC
PUBLIC_NETWORK = "198.18.0.0/15"  # set apart for benchmarks, routed nowhere
_SETUP = f"""
link set lo up
address add {HOST_ADDRESS}/32 dev lo
address add {METADATA_ADDRESS}/32 dev lo
link add name sink type veth peer name sink-end
link set sink arp off
link set sink up
link set sink-end arp off
link set sink-end up
route add {PRIVATE_NETWORK} dev sink src {HOST_ADDRESS}
route add {PUBLIC_NETWORK} dev sink src {HOST_ADDRESS}
"""
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def create(name: str) -> None:
    """Make the namespace `name`. Raises subprocess.CalledProcessError."""
    subprocess.run(["ip", "netns", "add", name], check=True)
    subprocess.run(["ip", "-netns", name, "-batch", "-"], input=_SETUP, text=True, check=True)
    with inside(name):
        for setting, value in {"ip_forward": 1, "conf/all/rp_filter": 0, "conf/default/rp_filter": 0}.items():
            Path(f"/proc/sys/net/ipv4/{setting}").write_text(str(value))


def exists(name: str) -> bool:
    return _file(name).exists()


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """The calling thread is inside for the block, with its new sockets and what it starts."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        there = os.open(_file(name), os.O_RDONLY)
        try:
            _enter(there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _enter(before)
    finally:
        os.close(before)


def remove(name: str) -> None:
    """Kill all processes inside, and remove the namespace. Not to be called from inside."""
    while alive := pids(name):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)  # or somebody did


def pids(name: str) -> list[int]:
    """Who is inside and alive; the dead whom nobody has waited for have no namespace any more."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    if listed.returncode and exists(name):
        raise RuntimeError(f"ip netns pids {name}: {listed.stderr}")
    found = [int(pid) for pid in listed.stdout.split()]
    if os.getpid() in found:
        raise RuntimeError(f"a rig can't be closed from within {name}")
    return found


def _file(name: str) -> Path:
    return Path("/run/netns") / name


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
