"""Several engines on one rollout machine: policies come once, and what becomes of one engine is its own affair."""

from __future__ import annotations

import asyncio
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.stream import manifest
from grpo_orch.policies.model.gpus import VISIBLE
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.serving.fitness import STARTS_MAX, TRIES
from grpo_orch.policies.serving.wire import Announce, EngineStats, PolicyRef
from grpo_orch.tasks.machine.children import descendants
from grpo_orch.tasks.rollout import engine_files
from grpo_orch.tasks.rollout.agent import gpus_of_engines
from grpo_orch.tasks.rollout.rollout_engine import EngineAbandoned
from grpo_orch.tasks.rollout.vllm.server import PolicyRefused, ServerFailed
from tests.budget import HANG_S
from tests.rigs.rollout_machine import Boot, Machine, spec_of

FIRST, SECOND = ENGINES = ["rollout-0-i1.0", "rollout-0-i1.1"]
SHARES = ["0,1", "2,3"]
LOOK_S = 0.001


async def both_hold(machine: Machine, policy: PolicyRef) -> dict[str, Announce]:
    """What the two announce once both hold it."""
    label = policy.label
    await machine.until(lambda _: [one.policy for one in machine.members.values()] == [label, label])
    return dict(sorted(machine.members.items()))


async def test_engines_have_own_gpus_and_share_one_policy_fetch(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = machine.publish(0, size_bytes=1000), machine.publish(1, size_bytes=1000)
    fetched, bring = list[str](), manifest.materialize

    def counted(store: Any, root: str, *rest: Any) -> None:
        fetched.append(root)
        bring(store, root, *rest)

    monkeypatch.setattr(manifest, "materialize", counted)
    machine.start(first, SHARES)
    said = await both_hold(machine, first)
    assert list(said) == ENGINES
    assert {one.engines for one in said.values()} == {2}
    assert len({one.boot_id for one in said.values()}) == 2
    assert sorted((boot.member, boot.gpus) for boot in machine.boots) == list(zip(ENGINES, SHARES, strict=True))
    machine.wanted = second
    await both_hold(machine, second)
    assert fetched == [first.prefix, second.prefix]
    assert len(machine.boots) == 2


async def test_dead_engine_is_restarted_while_its_sibling_serves(machine: Machine) -> None:
    first, second = machine.publish(0), machine.publish(1)
    machine.start(first, SHARES)
    before = await both_hold(machine, first)
    machine.comes_up.clear()
    await machine.boots_of(SECOND)[0].stop()
    await machine.eventually(lambda: list(machine.members) == [FIRST])
    assert machine.left == [SECOND]
    machine.wanted = second  # while it starts
    await machine.holds(second)
    machine.comes_up.set()
    after = await both_hold(machine, second)
    assert after[FIRST].boot_id == before[FIRST].boot_id
    assert after[SECOND].boot_id != before[SECOND].boot_id
    assert [boot.member for boot in machine.boots[2:]] == [SECOND]


async def fails(_: Boot) -> None:
    raise ServerFailed("no such GPU")


async def hangs(_: Boot) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("start", "start_limit_s"),
    [(fails, HANG_S), (Boot.stop, HANG_S), (hangs, 0.01)],
    ids=["fails", "ends", "hangs"],
)
async def test_engine_that_never_serves_is_abandoned_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, start: Any, start_limit_s: float
) -> None:
    """The controller, which sees that the machine serves, does not end it."""
    first, second = machine.publish(0), machine.publish(1)

    async def on_start(boot: Boot) -> None:
        if boot.member == SECOND:
            await start(boot)

    monkeypatch.setattr(engine_files, "stage_limit_s", lambda *_: start_limit_s)
    machine.on_start = on_start
    machine.start(first, SHARES)
    await machine.eventually(lambda: machine.agent.engines[1].is_given_up)
    await machine.holds(first)
    machine.wanted = second
    await machine.holds(second)
    assert (len(machine.boots_of(FIRST)), len(machine.boots_of(SECOND))) == (1, STARTS_MAX)


@pytest.mark.parametrize(("works", "given_up"), [(0, True), (40, True), (80, False)])
async def test_engine_dying_at_first_requests_is_abandoned(
    machine: Machine, works: int, *, given_up: bool
) -> None:
    """Its policy loads and it becomes a member, each time. One that has worked for long is started again."""

    def word(boot: Boot) -> EngineStats:
        """It works from when it holds the policy, and dies after so many looks."""
        if boot.member == SECOND and boot.looks > works:
            boot.ends.set()
        return EngineStats(running=1, tokens=boot.looks)

    async def takes_as_long_as_60_looks(boot: Boot) -> None:
        boot.start_s, boot.trial_s = 50 * LOOK_S, 10 * LOOK_S

    machine.timing = replace(machine.timing, poll_s=LOOK_S)
    machine.on_look, machine.on_start = word, takes_as_long_as_60_looks
    machine.start(machine.publish(0), SHARES)
    second = machine.agent.engines[1]
    await machine.eventually(lambda: second.is_given_up or len(machine.boots_of(SECOND)) > STARTS_MAX)
    assert second.is_given_up is given_up
    assert len(machine.boots_of(FIRST)) == 1
    assert sum(boot.loads > 0 for boot in machine.boots) >= 1 + STARTS_MAX


@pytest.mark.parametrize(("lame", "ends"), [(1, False), (2, False), (3, True), (4, True)])
async def test_machine_ends_once_less_than_half_its_engines_remain(
    machine: Machine, lame: int, *, ends: bool
) -> None:
    async def on_start(boot: Boot) -> None:
        if int(boot.member[-1]) < lame:
            raise ServerFailed("no such GPU")

    machine.on_start = on_start
    machine.start(machine.publish(0), ["0", "1", "2", "3"])
    if ends:
        error = await machine.failure()
        assert isinstance(error, ExceptionGroup)
        assert error.subgroup(EngineAbandoned) is not None
        assert all(boot.ends.is_set() for boot in machine.boots if int(boot.member[-1]) >= lame)
    else:
        await machine.eventually(lambda: sum(one.is_given_up for one in machine.agent.engines) == lame)


@pytest.mark.parametrize("touched", [True, False])
async def test_engine_that_computes_otherwise_is_unfit_alone(machine: Machine, *, touched: bool) -> None:
    async def on_load(boot: Boot) -> None:
        if boot.member == SECOND:
            raise PolicyRefused("its canary is another's", touched=touched)

    wanted, machine.on_load = machine.publish(0), on_load
    machine.start(wanted, SHARES, bare=False)
    await machine.until(lambda one: bool(one.unfit))
    await machine.eventually(lambda: machine.members[FIRST].policy == wanted.label)
    assert machine.members[FIRST].unfit == ""
    assert machine.members[SECOND].unfit.endswith("its canary is another's")
    assert len(machine.boots_of(SECOND)) == (TRIES + 1 if touched else 1)
    assert len(machine.boots_of(FIRST)) == 1


async def until_both_start(machine: Machine) -> None:
    await machine.eventually(lambda: len(machine.boots) == 2)
    machine.comes_up.set()  # both at once


async def test_engine_hanging_in_load_is_killed_and_others_go_on(
    machine: Machine,
) -> None:
    async def on_load(boot: Boot) -> None:
        if boot in machine.boots[:2] and boot.member == SECOND:
            await asyncio.Event().wait()

    machine.timing = replace(machine.timing, late_s=0.1)
    first, second = machine.publish(0), machine.publish(1)
    machine.on_load = on_load
    machine.comes_up.clear()
    machine.start(first, SHARES)
    await until_both_start(machine)
    await machine.holds(first)  # its sibling
    machine.wanted = second
    said = await both_hold(machine, second)
    assert len(machine.boots_of(SECOND)) == 2
    assert said[FIRST].boot_id in {boot.boot_id for boot in machine.boots[:2]}


async def test_engine_whose_sibling_fails_has_all_its_load_time(machine: Machine) -> None:
    async def on_load(boot: Boot) -> None:
        if boot.member == SECOND:
            raise ServerFailed("it is gone")
        await machine.eventually(lambda: len(machine.boots) >= 3)

    machine.timing = replace(machine.timing, late_s=0.0)
    wanted, machine.on_load = machine.publish(0), on_load
    machine.comes_up.clear()
    machine.start(wanted, SHARES, bare=False)
    await until_both_start(machine)
    assert (await machine.holds(wanted)).boot_id in {boot.boot_id for boot in machine.boots[:2]}


@pytest.mark.parametrize(
    ("visible", "flags", "grpo", "shares"),
    [
        ("0,1", {}, {}, ["0", "1"]),
        ("4,5,6,7", {"tensor_parallel_size": 2}, {}, ["4,5", "6,7"]),
        ("4,5,6,7", {"tensor-parallel-size": 2, "pipeline-parallel-size": 2}, {}, [""]),
        ("0,1", {}, {"use_cpu": True}, [""]),  # of a daemon that may see them, for a run that uses none
        ("", {}, {}, [""]),
    ],
)
def test_a_machine_divides_the_gpus_that_it_sees(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    flags: dict[str, Any],
    grpo: dict[str, Any],
    shares: list[str],
) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    run: RunSpec = replace(spec_of(tmp_path, flags), grpo=grpo)
    assert gpus_of_engines(run) == shares


def test_process_between_two_programs_belongs_to_its_boot(tmp_path: Path) -> None:
    again = tmp_path / "again.sh"
    again.write_text(f"exec sh {again}")
    process = subprocess.Popen(["sh", again], env={**os.environ, "BOOT": str(tmp_path)})
    try:
        found = (descendants(("BOOT", str(tmp_path))) for _ in range(300))
        assert all([one.pid for one in living] == [process.pid] for living in found)
    finally:
        process.kill()
        process.wait()
