"""What a run has on AWS, asked of moto's EC2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws
from moto.ec2.exceptions import DependencyViolationError
from moto.ec2.models.security_groups import SecurityGroupBackend

from grpo_orch.orchestrator.clouds.protocol import CloudUnavailable
from grpo_orch.orchestrator.clouds.sky.aws import Account
from grpo_orch.orchestrator.clouds.sky.records import ClusterState

EAST, WEST = "us-east-1", "us-west-2"
LABEL = "grpo-orch"


def client(region: str) -> Any:
    return boto3.client("ec2", region_name=region)


ACCOUNT = Account(client, "grpo-a", lambda: ["AWS"])
BOTH = [f"aws/{EAST}", f"aws/{WEST}"]


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    with mock_aws():
        yield


def launch(name: str, region: str, **options: Any) -> str:
    tags = [{"ResourceType": "instance", "Tags": [{"Key": LABEL, "Value": name}]}]
    made = client(region).run_instances(
        ImageId="ami-12c6146b", InstanceType="m6i.large", MinCount=1, MaxCount=1, TagSpecifications=tags, **options
    )
    return str(made["Instances"][0]["InstanceId"])


def groups(region: str) -> list[str]:
    return sorted(group["GroupName"] for group in client(region).describe_security_groups()["SecurityGroups"])


def test_machines_are_found_in_all_regions() -> None:
    launch("grpo-a-trainer-0-i1", "eu-central-1")
    assert [one.region for one in ACCOUNT.machines("grpo-a-", ["aws"])] == ["eu-central-1"]


def test_machines_are_found_by_their_label_and_terminated() -> None:
    for name in ("grpo-ab-trainer-0-i1", "else"):
        launch(name, EAST)
    spot = launch("grpo-a-rollout-0-i1", EAST, InstanceMarketOptions={"MarketType": "spot"})
    stopped = launch("grpo-a-trainer-0-i1", WEST)
    client(WEST).stop_instances(InstanceIds=[stopped])
    found = ACCOUNT.machines("grpo-a-", BOTH)
    assert [(one.id, one.name, one.region, one.state, one.spot) for one in found] == [
        (spot, "grpo-a-rollout-0-i1", EAST, ClusterState.UP, True),
        (stopped, "grpo-a-trainer-0-i1", WEST, ClusterState.STOPPED, False),
    ]
    assert (found[0].zone, found[0].machine) == ("us-east-1a", "m6i.large")
    assert found[0].address
    assert ACCOUNT.machines("grpo-a-", BOTH[1:]) == found[1:]
    ACCOUNT.terminate(found)
    assert ACCOUNT.machines("grpo-a-", BOTH) == []
    assert len(ACCOUNT.machines("", BOTH[:1])) == 2


def test_security_group_is_deleted_only_when_unused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for region in (EAST, WEST):
        for name in ("grpo-a", "grpo-ab"):
            client(region).create_security_group(GroupName=name, Description="some")

    def refuse(*_: object, **__: object) -> None:
        raise DependencyViolationError("sg-1 has a dependent object")

    with monkeypatch.context() as used:
        used.setattr(SecurityGroupBackend, "delete_security_group", refuse)
        with pytest.raises(CloudUnavailable, match="sg-1 has a dependent object"):
            ACCOUNT.drop_group(BOTH[:1], 0.0)
    for _ in range(2):
        ACCOUNT.drop_group(BOTH[:1], 0.0)
    assert (groups(EAST), groups(WEST)) == (["default", "grpo-ab"], ["default", "grpo-a", "grpo-ab"])
