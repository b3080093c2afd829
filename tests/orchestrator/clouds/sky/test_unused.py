"""Whose credentials stay at home."""

from __future__ import annotations

from orchestrator.clouds.sky.work import SETTABLE, unused_clouds


def test_only_what_a_run_surely_does_not_use_is_withheld() -> None:
    assert unused_clouds(["aws/us-east-1", "aws"], "s3://b/r") == sorted(SETTABLE - {"aws"})
    assert unused_clouds(["gcp/us-east1"], "s3://b/r") == sorted(SETTABLE - {"aws", "gcp"})
    assert "ssh" not in unused_clouds(["kubernetes/a"], "gs://b/r")  # they share a file
    assert unused_clouds([None], "s3://b/r") == unused_clouds(["aws"], "abfs://b/r") == []
