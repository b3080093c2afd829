"""A rollout node's full disk, and policies that vLLM does not load: the agent lives, says so, and stops trying."""

from __future__ import annotations

import errno
import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_orch.checkpoint.store.errors import Corrupt
from grpo_orch.policies.serving.fitness import TRIES, Fitness
from grpo_orch.tasks.rollout.agent import LossyStream
from grpo_orch.tasks.rollout.policy_folders import PolicyFolders, Superseded
from grpo_orch.tasks.rollout.vllm.server import PolicyRefused, ServerFailed
from tests.rigs.rollout_machine import Boot, Machine

MIB = 1 << 20


def test_temporary_failure_is_retried_after_a_while() -> None:
    fitness = Fitness()
    for _ in range(TRIES):
        assert fitness.should_try("a")
        fitness = fitness.after_failure("a", "disk full", is_temporary=True)
    assert not fitness.should_try("a")
    later = fitness.after_time()
    assert later.should_try("a")
    assert later.unfit == "disk full"
    assert not later.after_failure("a", "disk full", is_temporary=True).should_try("a")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40))
def test_no_policy_is_tried_without_end(steps: list[tuple[str, bool]]) -> None:
    fitness, in_a_row, before = Fitness(), 0, ""
    for wanted, passes in steps:
        in_a_row = in_a_row if wanted == before else 0
        before = wanted
        if fitness.should_try(wanted):
            in_a_row += 1
            fitness = fitness.after_failure(wanted, "why", is_temporary=passes)
        assert in_a_row <= TRIES


class SmallDisk:
    """A folder on which so many bytes fit: beyond them the kernel writes what fits, then nothing."""

    def __init__(self, root: Path, size_bytes: int) -> None:
        self.root, self.size_bytes, self.pwrite = root, size_bytes, os.pwrite

    def write(self, file: int, data: bytes | memoryview, offset: int) -> int:
        used = sum(path.stat().st_blocks * 512 for path in self.root.rglob("*") if path.is_file())
        fits = max(0, min(len(data), self.size_bytes - used))
        if not fits:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.pwrite(file, data[:fits], offset)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallDisk:
    small = SmallDisk(tmp_path / "work", 5 * MIB)
    small.root.mkdir()
    monkeypatch.setattr(os, "pwrite", small.write)
    return small


def test_full_disk_is_freed_of_unneeded_policies(disk: SmallDisk, machine: Machine) -> None:
    first, second = machine.publish(0, size_bytes=3 * MIB), machine.publish(1, size_bytes=3 * MIB)
    folders = PolicyFolders(machine.store, disk.root / "policies")
    folders.fetch(first, lambda: True)
    with pytest.raises(OSError, match=r"No space left on device; \d+ MiB are free after deleting all older"):
        folders.fetch(second, lambda: True)
    assert not list(disk.root.rglob("*.safetensors"))
    folder = folders.fetch(second, lambda: True)
    published = machine.folder / "weights" / "0.safetensors"
    assert (folder / "0.safetensors").read_bytes() == published.read_bytes()


def test_superseded_download_ends(machine: Machine, tmp_path: Path) -> None:
    wanted, pieces = machine.publish(0, files=60), iter(range(60))
    with pytest.raises(Superseded):
        PolicyFolders(machine.store, tmp_path / "policies").fetch(wanted, lambda: next(pieces) < 5)
    (part,) = (tmp_path / "policies").iterdir()  # for the next try; no policy
    assert part.name.startswith(".")


@pytest.mark.parametrize(("digits", "taken"), [(0, True), (12, False), (32, True)])
def test_policy_is_fetched_by_its_whole_digest_or_none(
    machine: Machine, tmp_path: Path, digits: int, *, taken: bool
) -> None:
    wanted, folders = machine.publish(0), PolicyFolders(machine.store, tmp_path / "policies")
    named = replace(wanted, digest=wanted.digest[:digits])
    if taken:
        assert folders.fetch(named, lambda: True).name == named.label
    for refused in [*([] if taken else [named]), *([replace(named, digest="0" * digits)] if digits else [])]:
        with pytest.raises(Corrupt, match="holds policy"):
            folders.fetch(refused, lambda: True)


@pytest.mark.parametrize(
    ("error", "boots"),
    [
        (ServerFailed("PUT /grpo/policy: \x1b[31m 500 no such tensor"), 4),
        (PolicyRefused("500 no such tensor", touched=True), 4),
        (PolicyRefused("500 no such tensor", touched=False), 1),
    ],
    ids=["failed", "touched", "untouched"],
)
async def test_policy_that_does_not_load_makes_node_unfit_for_it(
    machine: Machine, error: Exception, boots: int
) -> None:
    bad, good = machine.publish(0), machine.publish(1)

    async def on_load(_: Boot) -> None:
        if machine.loads[-1] == bad.label:
            raise error

    machine.on_load = on_load
    machine.start(bad, bare=False)
    said = await machine.until(lambda one: bool(one.unfit) and len(machine.boots) == boots)
    assert said.unfit.startswith(f"policy {bad.label}: ")
    assert "500 no such tensor" in said.unfit
    assert said.unfit.isprintable()
    for _ in range(20):
        await machine.until(lambda one: bool(one.unfit))
    assert (len(machine.boots), machine.loads) == (boots, [bad.label] * TRIES)
    machine.wanted = good
    assert (await machine.holds(good)).unfit == ""
    assert len(machine.boots) == boots


async def test_agent_outlives_a_full_disk_and_reports_it(disk: SmallDisk, machine: Machine) -> None:
    machine.timing = replace(machine.timing, again_s=0.2)
    small, large = machine.publish(0, size_bytes=3 * MIB), machine.publish(1, size_bytes=8 * MIB)
    machine.start(small)
    await machine.holds(small)
    machine.wanted = large
    said = await machine.until(lambda one: bool(one.unfit))
    assert "No space left on device" in said.unfit
    assert said.policy == small.label  # which it holds in memory
    machine.wanted = small
    await machine.until(lambda one: not one.unfit)
    machine.wanted = large
    await machine.until(lambda one: bool(one.unfit))
    disk.size_bytes = 20 * MIB  # somebody made room
    assert (await machine.holds(large)).unfit == ""
    assert len(machine.boots) == 1


def test_a_log_on_a_full_disk_loses_lines_and_nothing_else() -> None:
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(errno.ENOSPC, "full")

        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "full")

    log = LossyStream(Full())
    log.write("a line\n")
    log.flush()
