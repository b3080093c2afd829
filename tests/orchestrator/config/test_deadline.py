"""`policies.fleet.deadline` as users write it: one line for what is wrong, and what stands in its way."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.load import ConfigError, Loaded, load
from tests.generators.config_world import VALID, changed, furnish

NOW_S = 1764000000.0  # 2025-11-24 16:00 UTC
EXPECTED = "expected a date and a time with its zone, as in 2026-11-30T18:00+01:00"
KEY = "policies.fleet.deadline"


def loaded(folder: Path, deadline: str, *changes: tuple[str, str]) -> Loaded:
    furnish(folder)
    with_deadline = ("policies:\n", f"policies:\n  fleet: {{deadline: {deadline}}}\n")
    (folder / "run.yaml").write_text(changed(with_deadline, *changes))
    return load(folder / "run.yaml", now=lambda: NOW_S)


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        ("2025-11-30T18:00+01:00", "2025-11-30T17:00:00Z"),
        ("2025-11-30T18:00:30Z", "2025-11-30T18:00:30Z"),
        ("'2025-11-30 18:00-05:00'", "2025-11-30T23:00:00Z"),
    ],
)
def test_a_time_with_its_zone_is_stored_in_utc(tmp_path: Path, written: str, stored: str) -> None:
    found = loaded(tmp_path, written)
    assert found.spec.policies.fleet.deadline == stored
    assert not [one for one in found.notices if one.key == KEY]


def test_without_a_zone_it_is_utc_and_says_so(tmp_path: Path) -> None:
    found = loaded(tmp_path, "2025-11-30 18:00")
    assert found.spec.policies.fleet.deadline == "2025-11-30T18:00:00Z"
    (told,) = (one for one in found.notices if one.key == KEY)
    assert "is read as UTC" in told.message


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("monday", f"{EXPECTED}, got 'monday'"),
        ("2025-11-30", f"{EXPECTED}, got '2025-11-30'"),
        ("2025-13-30T18:00Z", f"{EXPECTED}, got '2025-13-30T18:00Z'"),
        ("'18:00'", f"{EXPECTED}, got '18:00'"),
        ("0001-01-01T00:00+14:00", f"{EXPECTED}, got '0001-01-01T00:00+14:00'"),
        ("1764525600", f"{EXPECTED}, got 1764525600"),
        ("[1]", f"{EXPECTED}, got a list"),
        (
            "2025-11-24T17:00+01:00",
            "has passed: 2025-11-24T17:00+01:00 is before now, 2025-11-24T16:00:00Z; expected a time to come",
        ),
    ],
)
def test_what_is_no_time_to_come_is_one_line(tmp_path: Path, written: str, told: str) -> None:
    with pytest.raises(ConfigError) as found:
        loaded(tmp_path, written)
    assert [(one.key, one.message) for one in found.value.problems] == [(KEY, told)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("max_steps: 40", "num_train_epochs: 2"), "cannot be judged before the run trains"),
        (("replicas: 2", "replicas: 0"), "there are no rollout nodes"),
        (("replicas: 2", "replicas: 2\n  resources: {use_spot: true}"), "is kept only while spot can be had"),
    ],
)
def test_what_stands_in_its_way_is_said(tmp_path: Path, change: tuple[str, str], told: str) -> None:
    changes = [change]
    if "replicas: 0" in change[1]:
        changes += [(VALID[VALID.index("rehearse:") :], "")]
    found = loaded(tmp_path, "2025-11-30T18:00Z", *changes)
    (notice,) = (one for one in found.notices if one.key == KEY)
    assert told in notice.message
