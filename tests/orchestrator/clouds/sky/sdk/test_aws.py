"""What a run has on AWS, asked of moto's EC2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws
from moto.ec2.exceptions import DependencyViolationError
from moto.ec2.models.security_groups import SecurityGroupBackend

from grpo_orch.orchestrator.clouds.sky import aws
from grpo_orch.orchestrator.clouds.sky.records import ClusterState

EAST, WEST = "us-east-1", "us-west-2"
LABEL = "grpo-orch"


def client(region: str) -> Any:
    return boto3.client("ec2", region_name=region)


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


def test_the_account_has_regions() -> None:
    assert {EAST, WEST, "eu-central-1"} <= aws.all_regions(client)


def test_machines_are_found_by_their_label_and_terminated() -> None:
    for name in ("grpo-ab-trainer-0-i1", "else"):
        launch(name, EAST)
    spot = launch("grpo-a-rollout-0-i1", EAST, InstanceMarketOptions={"MarketType": "spot"})
    stopped = launch("grpo-a-trainer-0-i1", WEST)
    client(WEST).stop_instances(InstanceIds=[stopped])
    found = aws.labelled(client, [EAST, WEST], LABEL, "grpo-a-")
    assert [(one.id, one.name, one.region, one.state, one.spot) for one in found] == [
        (spot, "grpo-a-rollout-0-i1", EAST, ClusterState.UP, True),
        (stopped, "grpo-a-trainer-0-i1", WEST, ClusterState.STOPPED, False),
    ]
    assert (found[0].zone, found[0].machine) == ("us-east-1a", "m6i.large")
    assert found[0].address
    assert aws.labelled(client, [WEST], LABEL, "grpo-a-") == found[1:]
    aws.terminate(client, found)
    assert aws.labelled(client, [EAST, WEST], LABEL, "grpo-a-") == []
    assert len(aws.labelled(client, [EAST], LABEL, "")) == 2


def test_a_security_group_is_dropped_where_asked_and_not_while_it_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for region in (EAST, WEST):
        for name in ("grpo-a", "grpo-ab"):
            client(region).create_security_group(GroupName=name, Description="some")

    def refuse(*_: object, **__: object) -> None:
        raise DependencyViolationError("sg-1 has a dependent object")

    with monkeypatch.context() as used:
        used.setattr(SecurityGroupBackend, "delete_security_group", refuse)
        (why,) = aws.drop_groups(client, [EAST], "grpo-a")
    assert "sg-1 has a dependent object" in why
    for _ in range(2):
        assert aws.drop_groups(client, [EAST], "grpo-a") == []
    assert (groups(EAST), groups(WEST)) == (["default", "grpo-ab"], ["default", "grpo-a", "grpo-ab"])
