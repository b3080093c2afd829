"""A network namespace for one system under test: its addresses, all on loopback, are its own.

A machine that vanishes is one of these addresses: packets from and to it are led into a device without an end, and
nobody is told.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.rigs.sky import network


@contextmanager
def namespace(name: str) -> Iterator[None]:
    """The calling thread is inside for the block, with what it starts. Raises subprocess.CalledProcessError."""
    if network.exists(name):  # of a run that was killed
        network.remove(name)
    network.create(name)
    try:
        with network.inside(name):
            subprocess.run(["tc", "qdisc", "add", "dev", "lo", "clsact"], check=True)
            yield
    finally:
        network.remove(name)


def vanish(address: str) -> None:
    """From now on every packet from and to the address is lost. To be called inside."""
    lost = "action mirred egress redirect dev sink"
    for way in ("src", "dst"):
        match = f"filter add dev lo ingress protocol ip u32 match ip {way} {address}/32 {lost}"
        subprocess.run(["tc", *match.split()], check=True)
