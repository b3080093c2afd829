"""What a bucket does by itself, asked through a real S3 API, and reported with its cost."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.store.backends.aws import BucketRules, RulesUnknown, rules_of
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.cli.doctor import lifecycle
from tests.rigs.store.server import S3Server


@pytest.fixture
def store(moto: S3Server, tmp_path: Path) -> Store:
    """A run in a bucket of its own."""
    name = "rules-" + "".join(char if char.isalnum() else "-" for char in tmp_path.name.lower())[-50:].strip("-")
    moto.client().create_bucket(Bucket=name)
    return Store(f"s3://{name}/runs/one", options=moto.options(), retry_s=5.0)


def bucket_of(store: Store) -> str:
    return store.url.split("/")[2]


def expire(moto: S3Server, store: Store, *rules: dict[str, Any]) -> None:
    told = [
        {"ID": str(number), "Status": "Enabled", "Filter": {"Prefix": ""}} | one
        for number, one in enumerate(rules)
    ]
    client = moto.client()
    client.put_bucket_lifecycle_configuration(Bucket=bucket_of(store), LifecycleConfiguration={"Rules": told})


def told(store: Store) -> list[str]:
    found = list(lifecycle(store))
    assert all(one.warning is not one.ok and not one.needed for one in found)
    return [one.details for one in found]


AT = {"Expiration": {"Date": datetime(2027, 1, 31, tzinfo=UTC)}}
MOVES = [{"Days": 1, "StorageClass": "STANDARD_IA"}, {"Days": 90, "StorageClass": "DEEP_ARCHIVE"}]
TAGGED = {"Filter": {"Tag": {"Key": "a", "Value": "b"}}, "Expiration": {"Days": 1}}


@pytest.mark.parametrize(
    ("versioned", "rules", "found", "lines"),
    [
        (False, [], BucketRules(), ["keeps no deleted objects and deletes none automatically"]),
        (True, [], BucketRules(versioned=True), ["keeps deleted and overwritten objects forever"]),
        (
            True,
            [{"NoncurrentVersionExpiration": {"NoncurrentDays": 7}}],
            None,
            ["for 7 days: for a 32B model at ten steps an hour, each day of retention keeps 15 TB"],
        ),
        (
            False,
            [AT, {"Transitions": MOVES[:1]}, {"Transitions": MOVES}],
            BucketRules(removing=("0", "2")),
            [
                "the lifecycle rule '0' of 'rules-",
                "deletes or archives objects, including those that a run needs",
            ],
        ),
        (
            False,
            [TAGGED, {"Status": "Disabled", "Expiration": {"Days": 1}}],
            BucketRules(),
            ["keeps no deleted objects"],
        ),
    ],
    ids=["plain", "versioned", "versioned for days", "an archive", "tagged or off"],
)
def test_bucket_rules_are_reported_with_their_cost(
    store: Store,
    moto: S3Server,
    versioned: bool,
    rules: list[dict[str, Any]],
    found: BucketRules | None,
    lines: list[str],
) -> None:
    if versioned:
        enabled = {"Status": "Enabled"}
        moto.client().put_bucket_versioning(Bucket=bucket_of(store), VersioningConfiguration=enabled)
    if rules:
        expire(moto, store, *rules)
    assert found is None or rules_of(store.url, store.options) == found
    for line, says in zip(told(store), lines, strict=True):
        assert says in line


@pytest.mark.parametrize(
    ("prefix", "is_harmful"),
    [
        ("", True),
        ("runs/", True),
        ("runs/one", True),
        ("runs/one/blobs/", True),
        ("runs/another/", False),
        ("ru", True),
    ],
)
def test_bucket_that_deletes_needed_objects_is_reported(
    store: Store, moto: S3Server, prefix: str, is_harmful: bool
) -> None:
    expire(moto, store, {"Filter": {"Prefix": prefix}, "Expiration": {"Days": 30}})
    assert any("deletes or archives objects" in line for line in told(store)) is is_harmful


def test_unreadable_bucket_rules_say_where_to_look(moto: S3Server) -> None:
    missing = Store("s3://no-such-bucket/run", options=moto.options())
    with pytest.raises(RulesUnknown, match="GetBucketVersioning of the bucket 'no-such-bucket' was refused: NoS"):
        rules_of(missing.url, missing.options)
    google = Store("gs://ours/run", options={"skip_signature": "true"})
    (line,) = told(google)
    assert line.startswith("the rules of a gs:// bucket cannot be read; a bucket keeps deleted objects for 7")
    assert "gcloud storage buckets update gs://ours --clear-soft-delete" in line
    assert "15 TB" in line


def test_a_folder_has_none(tmp_path: Path) -> None:
    assert told(Store(f"file://{tmp_path}/run")) == []
