"""A run's labelled machines and security group on AWS, and the machines among them that SkyPilot here does not
know.

SkyPilot knows what was launched through it here, by records of its own; AWS knows what there is. `client` is
everywhere a function from a region to boto3's EC2 client of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from orchestrator.clouds.protocol import CloudUnavailable
from orchestrator.clouds.sky.calls import find_out
from orchestrator.clouds.sky.errors import one_line
from orchestrator.clouds.sky.records import LABEL, ClusterState, Instance

Client = Callable[[str], Any]
GONE_EVERY_S = 1.0

STATES = {  # of machines that are there
    "pending": ClusterState.STARTING,
    "running": ClusterState.UP,
    "stopping": ClusterState.STOPPED,
    "stopped": ClusterState.STOPPED,
}


class Account:
    """What one run asks of AWS: nothing where `group`, its security group, is None or AWS is not enabled.

    `places` are where clusters may have been, as in `aws/us-east-1`, `aws` or `gcp`; None: anywhere. All calls
    raise CloudUnavailable and may be made again.
    """

    def __init__(self, client: Client, group: str | None, enabled: Callable[[], Iterable[str]]) -> None:
        """`enabled` returns the clouds that SkyPilot may use, and takes its time."""
        self._client = client
        self._group = group
        self._enabled = enabled
        self._is_enabled = False

    def machines(self, prefix: str, places: Iterable[str | None]) -> list[Instance]:
        """The machines whose label begins with `prefix`."""
        regions = self._regions(places)
        return find_out(lambda: labelled(self._client, regions, LABEL, prefix)) if regions else []

    def end(self, machines: Iterable[Instance]) -> None:
        """Have machines shut down, for good."""
        find_out(lambda: terminate(self._client, machines))

    def drop_group(self, places: Iterable[str | None], timeout_s: float) -> None:
        """Delete the security group in all regions; its machines may still be shutting down.

        No error when there is none. Raises CloudUnavailable also when AWS still keeps one.
        """
        deadline_s = time.monotonic() + timeout_s
        regions, group = self._regions(places), self._group or ""
        while left := find_out(lambda: drop_groups(self._client, regions, group)):
            if time.monotonic() > deadline_s:
                kept = f"no machine is left, but security group {group}, which costs nothing"
                raise CloudUnavailable(f"{kept}: {'; '.join(left)}; try again later")
            time.sleep(GONE_EVERY_S)

    def _regions(self, places: Iterable[str | None]) -> set[str]:
        """The regions of AWS among `places`; none where AWS is not to be asked from here."""
        named = {region for place in places if (region := _region(place)) is not None}
        if not self._group or not named:
            return set()
        self._is_enabled = self._is_enabled or "aws" in map(str.lower, self._enabled())
        if not self._is_enabled:
            return set()
        return find_out(lambda: all_regions(self._client)) if "" in named else named


def _region(place: str | None) -> str | None:
    """The region of AWS that `place` is or may be; empty: any. None: it is on another cloud."""
    cloud, region, *_ = [*(place or "*").split("/"), ""]
    return region.replace("*", "") if cloud in ("aws", "*") else None


def all_regions(client: Client) -> set[str]:
    """Every region that the account may use."""
    return {region["RegionName"] for region in client("us-east-1").describe_regions()["Regions"]}


def labelled(client: Client, regions: Iterable[str], label: str, prefix: str) -> list[Instance]:
    """The machines that are there, stopped ones too, whose `label` begins with `prefix`."""
    filters = [
        {"Name": f"tag:{label}", "Values": [f"{prefix}*"]},
        {"Name": "instance-state-name", "Values": list(STATES)},
    ]
    return [
        _instance(one, region, label)
        for region in sorted(regions)
        for page in client(region).get_paginator("describe_instances").paginate(Filters=filters)
        for reservation in page["Reservations"]
        for one in reservation["Instances"]
    ]


def terminate(client: Client, instances: Iterable[Instance]) -> None:
    """Have machines shut down, for good."""
    for instance in instances:
        client(instance.region).terminate_instances(InstanceIds=[instance.id])


def drop_groups(client: Client, regions: Iterable[str], group: str) -> list[str]:
    """Delete the security groups of that name. Returns why AWS keeps those that are left."""
    left = []
    for region in sorted(regions):
        ec2 = client(region)
        named = [{"Name": "group-name", "Values": [group]}]
        for found in ec2.describe_security_groups(Filters=named)["SecurityGroups"]:
            try:
                ec2.delete_security_group(GroupId=found["GroupId"])
            except ec2.exceptions.ClientError as error:
                left.append(one_line(str(error)))
    return left


def _instance(said: dict[str, Any], region: str, label: str) -> Instance:
    tags = {tag["Key"]: tag["Value"] for tag in said.get("Tags", [])}
    return Instance(
        id=said["InstanceId"],
        name=tags[label],
        region=region,
        zone=said["Placement"]["AvailabilityZone"],
        machine=said["InstanceType"],
        spot=said.get("InstanceLifecycle") == "spot",
        state=STATES[said["State"]["Name"]],
        address=said.get("PublicIpAddress"),
    )
