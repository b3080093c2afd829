"""Where a store is, by its URL and options."""

from __future__ import annotations

import pytest

from checkpoint.store.run_store import Store
from orchestrator.plan.prices import store_place
from policies.fleet.store_costs import Place


@pytest.mark.parametrize(
    ("url", "options", "place"),
    [
        ("s3://bucket/run", {"region": "eu-west-1"}, Place("aws", "eu-west-1")),
        ("s3://bucket/run", {"endpoint": "https://s3.us-east-2.amazonaws.com"}, Place("aws", "us-east-2")),
        ("s3://bucket/run", {"endpoint": "https://x.r2.cloudflarestorage.com", "region": "auto"}, Place("r2")),
        ("s3://bucket/run", {"endpoint": "https://minio.example"}, Place("")),
        ("s3://bucket/run", {}, Place("aws")),
        ("gs://bucket/run", {}, Place("gcp")),
        ("memory://run", {}, Place("local")),
    ],
)
def test_a_store_is_where_its_url_and_options_say(
    url: str, options: dict[str, str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    store = Store("memory://place", options={})
    store.url, store.options = url, dict(options)
    assert store_place(store) == place


def test_the_environment_names_a_region_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    store = Store("memory://place", options={})
    store.url = "s3://bucket/run"
    assert store_place(store) == Place("aws", "us-west-2")
