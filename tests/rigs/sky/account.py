"""The account as its owner sees it, through AWS's interface: furnished, and looked through at the end.

Everything runs in the rig's namespace, with the rig's endpoint and keys.
"""

from __future__ import annotations

import json
from typing import Any

import boto3

from tests.rigs.sky.home import ZONES
from tests.rigs.sky.network import HOST_ADDRESS

AWS_PORT = 5600
ENDPOINT = f"http://{HOST_ADDRESS}:{AWS_PORT}"
_ANYWHERE = "0.0.0.0/0"
_PROFILE = "skypilot-v1"


def client(service: str, region: str) -> Any:
    """A boto3 client of the account."""
    return boto3.client(
        service,
        region_name=region,
        endpoint_url=ENDPOINT,
        aws_access_key_id="AKIAFAKEFAKEFAKEFAKE",
        aws_secret_access_key="fakefakefakefakefakefakefakefakefakefake",
    )


def furnish() -> None:
    """What each real account has and moto's has not, and the instance profile that SkyPilot's first launch makes.

    SkyPilot takes a subnet without a way out for a private one, and waits half a minute after it made the profile.
    """
    for region in ZONES:
        ec2 = client("ec2", region)
        vpc_id = ec2.describe_vpcs(Filters=[_filter("isDefault", "true")])["Vpcs"][0]["VpcId"]
        gateway_id = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
        ec2.attach_internet_gateway(InternetGatewayId=gateway_id, VpcId=vpc_id)
        filters = [_filter("vpc-id", vpc_id), _filter("association.main", "true")]
        table = ec2.describe_route_tables(Filters=filters)["RouteTables"][0]
        ec2.create_route(RouteTableId=table["RouteTableId"], DestinationCidrBlock=_ANYWHERE, GatewayId=gateway_id)
    iam = client("iam", "us-east-1")
    trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
    iam.create_instance_profile(InstanceProfileName=_PROFILE)
    iam.create_role(RoleName=_PROFILE, AssumeRolePolicyDocument=json.dumps({"Statement": [trust]}))
    iam.add_role_to_instance_profile(InstanceProfileName=_PROFILE, RoleName=_PROFILE)


def inventory() -> dict[str, set[str]]:
    """Everything that costs money or lets somebody in, by kind, as "region/id"."""
    found: dict[str, set[str]] = {}
    for region in ZONES:
        for kind, names in _in_region(client("ec2", region)).items():
            found.setdefault(kind, set()).update(f"{region}/{name}" for name in names)
    return found


def _in_region(ec2: Any) -> dict[str, list[str]]:
    instances = [
        instance
        for reservation in ec2.describe_instances()["Reservations"]
        for instance in reservation["Instances"]
        if instance["State"]["Name"] != "terminated"
    ]
    return {
        "instances": [f"{i['InstanceId']} {i['State']['Name']}" for i in instances],
        "volumes": _ids(ec2.describe_volumes(), "Volumes", "VolumeId"),
        "key_pairs": _ids(ec2.describe_key_pairs(), "KeyPairs", "KeyName"),
        "security_groups": _ids(ec2.describe_security_groups(), "SecurityGroups", "GroupName"),
        "security_group_rules": [_rule(r) for r in ec2.describe_security_group_rules()["SecurityGroupRules"]],
        "network_interfaces": _ids(ec2.describe_network_interfaces(), "NetworkInterfaces", "NetworkInterfaceId"),
        "addresses": _ids(ec2.describe_addresses(), "Addresses", "PublicIp"),
        "spot_requests": _ids(
            ec2.describe_spot_instance_requests(), "SpotInstanceRequests", "SpotInstanceRequestId"
        ),
    }


def _rule(rule: dict[str, Any]) -> str:
    way = "out" if rule["IsEgress"] else "in"
    peer = rule.get("CidrIpv4") or rule.get("ReferencedGroupInfo", {}).get("GroupId")
    ports = f"{rule['FromPort']}-{rule['ToPort']}"
    return f"{rule['GroupId']} {way} {rule['IpProtocol']} {ports} {peer}"


def _ids(answer: dict[str, Any], kind: str, key: str) -> list[str]:
    return [str(item[key]) for item in answer[kind]]


def _filter(name: str, value: str) -> dict[str, Any]:
    return {"Name": name, "Values": [value]}
