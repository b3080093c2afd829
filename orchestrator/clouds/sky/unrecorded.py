"""The run's machines that AWS has and SkyPilot here does not know, because another SkyPilot launched them.

There are some after `resume` on another machine, or once SkyPilot's records are lost. The work on them goes on and
says in the store what it does; AWS is asked whether they are there, and to take them back. They get no new work,
for SkyPilot here does not have the key to them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.clouds.protocol import CloudUnavailable
from orchestrator.clouds.sky.records import Cluster, Instance
from orchestrator.clouds.sky.sdk.aws import GONE_EVERY_S

if TYPE_CHECKING:
    from orchestrator.clouds.sky.sdk.skypilot import SkyPilot

EVERY_S = 60.0
ELSEWHERE = "its work ended, and SkyPilot here did not launch it"
_NODE = re.compile(r"(trainer|rollout)-\d+-i\d+")


class UnrecordedClusters:
    """Those among the clusters `PREFIX...`; `places`: see `Account`. All calls raise CloudUnavailable."""

    def __init__(self, sky: SkyPilot, prefix: str, places: Sequence[str | None]) -> None:
        self._sky = sky
        self._prefix = prefix
        self._places = places
        self._due_s = 0.0
        self._found: dict[str, Instance] = {}

    def look(self) -> list[Cluster]:
        """All of them. While there are none, AWS is asked only every EVERY_S."""
        if self._found or time.monotonic() >= self._due_s:
            self._found = {one.name: one for one in self._ask()}
            self._due_s = time.monotonic() + EVERY_S
        return [self._sky.as_cluster(one) for one in list(self._found.values())]

    def has_machines(self, name: str) -> bool | None:
        """As `SkyPilot.has_machines`, of any cluster."""
        if name not in self._found:
            return self._sky.has_machines(name)
        return any(one.name == name for one in self._ask())

    def confirm(self, name: str, timeout_s: float) -> Cluster | None:
        """As `SkyPilot.confirm`, of any cluster."""
        if name not in self._found:
            return self._sky.confirm(name, timeout_s)
        return next((self._sky.as_cluster(one) for one in self._ask() if one.name == name), None)

    def is_idle(self, name: str, timeout_s: float) -> bool:
        """As `SkyPilot.is_idle`, of any cluster; False for these, of which nothing is known."""
        return name not in self._found and self._sky.is_idle(name, timeout_s)

    def down(self, name: str, timeout_s: float) -> None:
        """As `SkyPilot.down`, of any cluster, whoever launched it."""
        deadline_s = time.monotonic() + timeout_s
        self._sky.down(name, timeout_s)
        while name in self._found and (left := [one for one in self._ask() if one.name == name]):
            self._sky.end(left)
            if time.monotonic() > deadline_s:
                raise CloudUnavailable(f"{name} was taken down, but AWS still has {', '.join(o.id for o in left)}")
            time.sleep(GONE_EVERY_S)
        self._found = {other: one for other, one in self._found.items() if other != name}

    def clean_up(self) -> None:
        """Take back what AWS still has of the run, and then the machines' security group."""
        if left := self._ask():
            self._sky.end(left)
            raise CloudUnavailable(f"AWS still had {', '.join(sorted(one.name for one in left))}; try again")
        self._sky.drop_group(self._places, 0.0)

    def _ask(self) -> list[Instance]:
        found = self._sky.unrecorded(self._prefix, self._places)
        return [one for one in found if _NODE.fullmatch(one.name.removeprefix(self._prefix))]
