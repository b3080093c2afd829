"""What a run has on AWS, asked of AWS itself: its labelled machines and its security group. Imports no SkyPilot.

SkyPilot knows what was launched through it here, by records of its own; AWS knows what there is. Every function is
given a `client`: boto3's EC2 client of a region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from orchestrator.clouds.sky_errors import one_line
from orchestrator.clouds.sky_types import ClusterState, Instance

Client = Callable[[str], Any]

STATES = {  # of machines that are there
    "pending": ClusterState.STARTING,
    "running": ClusterState.UP,
    "stopping": ClusterState.STOPPED,
    "stopped": ClusterState.STOPPED,
}


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
