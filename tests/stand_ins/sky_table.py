"""SkyPilot played by a table: what `orchestrator.clouds.sky.skypilot` promises, without a cloud."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from orchestrator.clouds.sky.records import Cluster, ClusterState, Instance, SkyOffer
from orchestrator.clouds.sky.work import Work
from policies.model.vocabulary import Refusal

PREFIX = "grpo-sim-0-"  # of the clusters of the run `sim-0`


class Table:
    """SkyPilot as a table of clusters, with what was asked of it."""

    def __init__(self, elsewhere: dict[str, Cluster] | None = None) -> None:
        """`elsewhere`: what another SkyPilot has launched in the same account."""
        self.table: dict[str, Cluster] = {}
        self.elsewhere = elsewhere if elsewhere is not None else {}
        self.group = False  # whether the cloud has the machines' security group
        self.shutting_down = 0  # looks, after its machines are gone, until the cloud lets it go
        self.asked: list[str] = []
        self.works: list[Work] = []
        self.fails: Exception | None = None
        self.idle = False
        self.no_quota: set[bool] = set()  # the markets, spot or not, on which the account may have nothing

    def clusters(self, prefix: str) -> list[Cluster]:
        if isinstance(self.fails, CloudUnavailable):
            raise self.fails
        return [cluster for name, cluster in self.table.items() if name.startswith(prefix)]

    def confirm(self, name: str, _: float) -> Cluster | None:
        self.asked.append(f"confirm {name.removeprefix(PREFIX)}")
        return self.table.get(name)

    def has_machines(self, name: str) -> bool:
        return name in self.table

    def is_bought(self, name: str) -> bool | None:
        return name in self.table

    def launch(self, name: str, work: Work, _: float) -> Cluster:
        self.asked.append(f"launch {name.removeprefix(PREFIX)}")
        self.works.append(work)
        self.group = True
        if self.fails is not None:
            raise self.fails
        zone = "aws/us-east-1/us-east-1a"
        spot = bool(work.resources["use_spot"])
        self.table[name] = Cluster(name, ClusterState.UP, zone, spot, 0.4, None)
        return self.table[name]

    def run_again(self, name: str, _work: Work, _: float) -> None:
        self.asked.append(f"run_again {name.removeprefix(PREFIX)}")

    def is_idle(self, _name: str, _: float) -> bool:
        return self.idle

    def down(self, name: str, _: float) -> None:
        self.asked.append(f"down {name.removeprefix(PREFIX)}")
        self.table.pop(name, None)

    def unrecorded(self, prefix: str, _: Iterable[str | None]) -> list[Instance]:
        names = [name for name in list(self.elsewhere) if name.startswith(prefix) and name not in self.table]
        up = ClusterState.UP
        return [Instance(f"i-{name}", name, "us-east-1", "us-east-1a", "m", True, up, None) for name in names]

    def as_cluster(self, instance: Instance) -> Cluster:
        return replace(self.elsewhere[instance.name], unrecorded=True)

    def end(self, instances: Iterable[Instance]) -> None:
        for instance in instances:
            del self.elsewhere[instance.name]
            self.asked.append(f"end {instance.name.removeprefix(PREFIX)}")

    def drop_group(self, places: Iterable[str | None], _: float) -> None:
        assert None not in places
        if self.table or self.shutting_down:
            self.shutting_down -= 1
            raise CloudUnavailable("the security group is in use")
        self.group = False

    def log(self, name: str, *, follow: bool) -> Iterator[str]:
        yield name
        assert not follow

    def offers(self, resources: dict[str, Any], *, spot: bool) -> list[SkyOffer]:
        if spot and resources.get("instance_type") == "only-on-demand":
            raise CloudRefused(Refusal.QUOTA, "no spot of it")
        return [SkyOffer("aws/us-east-1/us-east-1a", "p5.48xlarge", "H100:8", spot, 21.5 if spot else 55.04)]

    def has_quota(self, offer: SkyOffer) -> bool:
        return offer.spot not in self.no_quota
