"""A run's labelled machines and its security group on AWS.

The local SkyPilot records only what it launched itself; AWS lists all machines. `client` is everywhere a function
from a region to boto3's EC2 client of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from grpo_orch.orchestrator.clouds.protocol import CloudUnavailable
from grpo_orch.orchestrator.clouds.sky.calls import query_cloud
from grpo_orch.orchestrator.clouds.sky.errors import one_line
from grpo_orch.orchestrator.clouds.sky.records import LABEL, ClusterState, Instance

Client = Callable[[str], Any]
GONE_EVERY_S = 1.0

STATES = {  # of machines that exist
    "pending": ClusterState.STARTING,
    "running": ClusterState.UP,
    "stopping": ClusterState.STOPPED,
    "stopped": ClusterState.STOPPED,
}


class Account:
    """A run's access to AWS. Does nothing if `group`, the run's security group, is None or AWS is not enabled.

    `places` are where clusters may have been, as in `aws/us-east-1`, `aws` or `gcp`; None: anywhere. All calls
    are idempotent and raise CloudUnavailable.
    """

    def __init__(self, client: Client, group: str | None, enabled: Callable[[], Iterable[str]]) -> None:
        """`enabled` returns the clouds that SkyPilot may use; it is slow."""
        self._client = client
        self._group = group
        self._enabled = enabled
        self._is_enabled = False

    def machines(self, prefix: str, places: Iterable[str | None]) -> list[Instance]:
        """Return the existing machines, stopped ones included, whose label begins with `prefix`."""
        regions = self._regions(places)
        filters = [
            {"Name": f"tag:{LABEL}", "Values": [f"{prefix}*"]},
            {"Name": "instance-state-name", "Values": list(STATES)},
        ]

        def query() -> list[Instance]:
            return [
                _instance(instance, region)
                for region in sorted(regions)
                for page in self._client(region).get_paginator("describe_instances").paginate(Filters=filters)
                for reservation in page["Reservations"]
                for instance in reservation["Instances"]
            ]

        return query_cloud(query) if regions else []

    def terminate(self, machines: Iterable[Instance]) -> None:
        """Terminate machines."""

        def request() -> None:
            for machine in machines:
                self._client(machine.region).terminate_instances(InstanceIds=[machine.id])

        query_cloud(request)

    def drop_group(self, places: Iterable[str | None], timeout_s: float) -> None:
        """Delete the security group in all regions; its machines may still be shutting down.

        No error if it does not exist. Raises CloudUnavailable also when AWS refuses until the deadline.
        """
        deadline_s = time.monotonic() + timeout_s
        regions, group = self._regions(places), self._group or ""
        while refusals := query_cloud(lambda: self._drop_groups(regions, group)):
            if time.monotonic() > deadline_s:
                message = (
                    f"all machines are gone, but AWS did not delete security group {group}, which costs nothing"
                )
                raise CloudUnavailable(f"{message}: {'; '.join(refusals)}; try again later")
            time.sleep(GONE_EVERY_S)

    def _regions(self, places: Iterable[str | None]) -> set[str]:
        """Return the AWS regions among `places`; empty without access to AWS."""
        named = {region for place in places if (region := _region(place)) is not None}
        if not self._group or not named:
            return set()
        self._is_enabled = self._is_enabled or "aws" in map(str.lower, self._enabled())
        if not self._is_enabled:
            return set()
        if "" not in named:
            return named
        found = query_cloud(lambda: self._client("us-east-1").describe_regions())["Regions"]
        return {region["RegionName"] for region in found}

    def _drop_groups(self, regions: Iterable[str], group: str) -> list[str]:
        """Delete the security groups of that name. Return AWS's error for each group that remains."""
        refusals = []
        for region in sorted(regions):
            ec2 = self._client(region)
            filters = [{"Name": "group-name", "Values": [group]}]
            for found in ec2.describe_security_groups(Filters=filters)["SecurityGroups"]:
                try:
                    ec2.delete_security_group(GroupId=found["GroupId"])
                except ec2.exceptions.ClientError as error:
                    refusals.append(one_line(str(error)))
        return refusals


def _region(place: str | None) -> str | None:
    """Return the AWS region of `place`; empty: any. None: another cloud."""
    cloud, region, *_ = [*(place or "*").split("/"), ""]
    return region.replace("*", "") if cloud in ("aws", "*") else None


def _instance(description: dict[str, Any], region: str) -> Instance:
    tags = {tag["Key"]: tag["Value"] for tag in description.get("Tags", [])}
    return Instance(
        id=description["InstanceId"],
        name=tags[LABEL],
        region=region,
        zone=description["Placement"]["AvailabilityZone"],
        machine=description["InstanceType"],
        spot=description.get("InstanceLifecycle") == "spot",
        state=STATES[description["State"]["Name"]],
        address=description.get("PublicIpAddress"),
    )
