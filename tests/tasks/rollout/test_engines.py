"""Several engines on one rollout machine: policies come once, and what becomes of one engine is its own affair.

vLLM and the gateway are stand-ins, and so are the GPUs: names that no driver knows.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from checkpoint.stream import manifest
from policies.model.gpus import VISIBLE
from policies.model.node_contract import NOTICE
from policies.model.spec import RunSpec
from policies.serving.fitness import STARTS_MAX, TRIES
from policies.serving.wire import Announce, EngineWord
from tasks.machine.children import _descendants, end_descendants
from tasks.rollout import base_here, node_agent, rollout_engine
from tasks.rollout.agent import gpus_of_engines
from tasks.rollout.rollout_engine import GaveUp
from tasks.rollout.vllm.server import PolicyRefused, Server, ServerFailed
from tests.budget import HANG_S
from tests.tasks.rollout.test_fitness import VLLM, World, publish, run_agent
from tests.tasks.rollout.test_rollout_agent import spec_of

ENGINES = ["rollout-0-i1.0", "rollout-0-i1.1"]
SHARES = ["0,1", "2,3"]


async def both_hold(world: World, label: str) -> dict[str, Announce]:
    """What the two say once both hold it."""
    await world.until(lambda _: [one.policy for one in world.members.values()] == [label, label])
    return dict(sorted(world.members.items()))


def test_each_engine_has_gpus_of_its_own_and_a_policy_is_fetched_once_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, first = publish(tmp_path, 0, size_bytes=1000)
    _, second = publish(tmp_path, 1, size_bytes=1000)
    fetched, bring = list[str](), manifest.materialize

    def counted(store: Any, root: str, *rest: Any) -> None:
        fetched.append(root)
        bring(store, root, *rest)

    async def story(world: World) -> None:
        said = await both_hold(world, first.label)
        assert list(said) == ENGINES
        assert {one.engines for one in said.values()} == {2}
        assert len({one.boot_id for one in said.values()}) == 2
        assert sorted((boot.member, boot.gpus) for boot in world.boots) == list(zip(ENGINES, SHARES, strict=True))
        world.wanted = second
        await both_hold(world, second.label)
        assert fetched == [first.prefix, second.prefix]
        assert len(world.boots) == 2

    monkeypatch.setattr(manifest, "materialize", counted)
    run_agent(lambda: World(store, tmp_path / "work", first, SHARES), story, monkeypatch)


def test_an_engine_that_dies_is_started_again_and_its_sibling_serves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, first = publish(tmp_path, 0, size_bytes=10)
    _, second = publish(tmp_path, 1, size_bytes=10)

    async def story(world: World) -> None:
        before = await both_hold(world, first.label)
        world.comes_up.clear()
        await next(boot for boot in world.boots if boot.member == ENGINES[1]).stop()
        await world.until(lambda _: list(world.members) == ENGINES[:1])
        assert world.left == ENGINES[1:]
        world.wanted = second  # while it starts
        await world.until(lambda one: one.policy == second.label)
        world.comes_up.set()
        after = await both_hold(world, second.label)
        assert after[ENGINES[0]].boot_id == before[ENGINES[0]].boot_id
        assert after[ENGINES[1]].boot_id != before[ENGINES[1]].boot_id
        assert [boot.member for boot in world.boots[2:]] == ENGINES[1:]

    run_agent(lambda: World(store, tmp_path / "work", first, SHARES), story, monkeypatch)


class Lame(World):
    """Of its engines these never come up."""

    lame: tuple[str, ...] = (ENGINES[1],)

    async def start(self, spec: Any, env: Any, *rest: Any, bare: bool, gpus: str) -> Server:
        server = await super().start(spec, env, *rest, bare=bare, gpus=gpus)
        if env.node in self.lame:
            raise ServerFailed("no such GPU")
        return server


def test_an_engine_that_does_not_come_up_is_given_up_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, first = publish(tmp_path, 0, size_bytes=10)
    _, second = publish(tmp_path, 1, size_bytes=10)

    async def story(world: World) -> None:
        await world.until(lambda one: one.policy == first.label)
        async with asyncio.timeout(HANG_S):
            while not world.agent._engines[1].given_up:
                await asyncio.sleep(0.01)
        world.wanted = second
        await world.until(lambda one: one.policy == second.label)
        assert [boot.member for boot in world.boots].count(ENGINES[1]) == STARTS_MAX
        assert [boot.member for boot in world.boots].count(ENGINES[0]) == 1

    monkeypatch.setattr(rollout_engine, "RESTART_WAIT_S", 0.0)
    run_agent(lambda: Lame(store, tmp_path / "work", first, SHARES), story, monkeypatch)


class Short(World):
    """Of its engines the second always ends before it is given a policy."""

    async def start(self, spec: Any, env: Any, *rest: Any, bare: bool, gpus: str) -> Server:
        server = await super().start(spec, env, *rest, bare=bare, gpus=gpus)
        if env.node == ENGINES[1]:
            await server.stop()
        return server


class Hung(World):
    """Of its engines the second starts for ever."""

    async def start(self, spec: Any, env: Any, *rest: Any, bare: bool, gpus: str) -> Server:
        server = await super().start(spec, env, *rest, bare=bare, gpus=gpus)
        if env.node == ENGINES[1]:
            await asyncio.Event().wait()
        return server


@pytest.mark.parametrize(("kind", "start_limit_s"), [(Short, HANG_S), (Hung, 0.01)])
def test_an_engine_that_never_comes_to_serve_is_given_up_though_its_sibling_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[World], start_limit_s: float
) -> None:
    """The controller, which sees that the machine serves, does not end it."""
    store, wanted = publish(tmp_path, 0, size_bytes=10)

    async def story(world: World) -> None:
        await world.until(lambda one: one.policy == wanted.label)
        async with asyncio.timeout(HANG_S):
            while not world.agent._engines[1].given_up:
                await asyncio.sleep(0.01)
        assert [boot.member for boot in world.boots].count(ENGINES[1]) == STARTS_MAX
        assert [boot.member for boot in world.boots].count(ENGINES[0]) == 1

    monkeypatch.setattr(rollout_engine, "RESTART_WAIT_S", 0.0)
    monkeypatch.setattr(base_here, "limit_s", lambda *_: start_limit_s)
    run_agent(lambda: kind(store, tmp_path / "work", wanted, SHARES), story, monkeypatch)


class Costly(World):
    """An engine takes a minute to start, as long as 60 looks."""

    async def start(self, spec: Any, env: Any, *rest: Any, bare: bool, gpus: str) -> Server:
        server = await super().start(spec, env, *rest, bare=bare, gpus=gpus)
        self.boots[-1].start_s, self.boots[-1].trial_s = 50 * LOOK_S, 10 * LOOK_S
        return server


LOOK_S = 0.001


@pytest.mark.parametrize(("works", "given_up"), [(0, True), (40, True), (80, False)])
def test_an_engine_that_dies_at_its_first_requests_each_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: int, *, given_up: bool
) -> None:
    """Its policy loads and it becomes a member, each time. One that has worked for long is started again."""
    store, wanted = publish(tmp_path, 0, size_bytes=10)

    async def word(boot: VLLM) -> EngineWord:
        """It works from when it holds the policy, and dies after so many looks."""
        boot.looks += boot.boot_id in boot.world.loaded_by
        if boot.member == ENGINES[1] and boot.looks > works:
            boot.ends.set()
        return EngineWord(running=1, tokens=boot.looks)

    async def story(world: World) -> None:
        second = world.agent._engines[1]
        async with asyncio.timeout(HANG_S):
            while not second.given_up and [one.member for one in world.boots].count(ENGINES[1]) <= STARTS_MAX:
                await asyncio.sleep(0.001)
        assert second.given_up is given_up
        assert [one.member for one in world.boots].count(ENGINES[0]) == 1
        assert sum(boot.boot_id in world.loaded_by for boot in world.boots) >= 1 + STARTS_MAX

    monkeypatch.setattr(VLLM, "ask_engine", word)
    monkeypatch.setattr(rollout_engine, "ENGINE_POLL_S", LOOK_S)
    monkeypatch.setattr(rollout_engine, "RESTART_WAIT_S", 0.0)
    run_agent(lambda: Costly(store, tmp_path / "work", wanted, SHARES), story, monkeypatch)


@pytest.mark.parametrize(("lame", "ends"), [(1, False), (2, False), (3, True), (4, True)])
def test_a_machine_ends_its_work_once_fewer_than_half_of_its_engines_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lame: int, *, ends: bool
) -> None:
    store, wanted = publish(tmp_path, 0, size_bytes=10)

    async def story() -> None:
        world = Lame(store, tmp_path / "work", wanted, ["0", "1", "2", "3"])
        world.lame = tuple(f"rollout-0-i1.{engine}" for engine in range(lame))
        monkeypatch.setattr("tasks.rollout.vllm.server.start", world.start)
        work = asyncio.ensure_future(world.agent.run())
        async with asyncio.timeout(HANG_S):
            while not work.done() and sum(one.given_up for one in world.agent._engines) < lame:
                await asyncio.sleep(0.01)
        if ends:
            await asyncio.wait({work}, timeout=HANG_S)
            error = work.exception()
            assert isinstance(error, ExceptionGroup)
            assert error.subgroup(GaveUp) is not None
        else:
            assert not work.done()
            work.cancel()
            await asyncio.wait({work}, timeout=HANG_S)
        assert all(boot.ends.is_set() for boot in world.boots if boot.member not in world.lame)

    monkeypatch.setattr(rollout_engine, "RESTART_WAIT_S", 0.0)
    asyncio.run(story())


def test_a_notice_drains_every_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, wanted = publish(tmp_path, 0, size_bytes=10)

    async def story(world: World) -> None:
        await both_hold(world, wanted.label)
        (tmp_path / "work" / NOTICE).write_text("120")
        async with asyncio.timeout(HANG_S):
            while world.members:
                world.heard.clear()
                await world.heard.wait()
        assert sorted(world.left) == ENGINES
        assert [one.draining for one in world.said[-2:]] == [True, True]

    run_agent(lambda: World(store, tmp_path / "work", wanted, SHARES), story, monkeypatch)


@pytest.mark.parametrize("touched", [True, False])
def test_an_engine_that_computes_something_else_is_unfit_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, touched: bool
) -> None:
    store, wanted = publish(tmp_path, 0, size_bytes=10)

    class Astray(World):
        async def delays(self, boot: VLLM) -> None:
            if boot.member == ENGINES[1]:
                raise PolicyRefused("its canary is another's", touched=touched)

    async def story(world: World) -> None:
        for engine in world.agent._engines:
            engine._bare = False
        await world.until(lambda one: bool(one.unfit))
        said = world.members
        assert (said[ENGINES[0]].policy, said[ENGINES[0]].unfit) == (wanted.label, "")
        assert said[ENGINES[1]].unfit.endswith("its canary is another's")
        tries = [boot for boot in world.boots if boot.member == ENGINES[1]]
        assert len(tries) == (TRIES + 1 if touched else 1)
        assert [boot.member for boot in world.boots].count(ENGINES[0]) == 1

    run_agent(lambda: Astray(store, tmp_path / "work", wanted, SHARES), story, monkeypatch)


def test_an_engine_that_hangs_in_a_load_is_ended_and_keeps_its_sibling_from_nothing_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, first = publish(tmp_path, 0, size_bytes=10)
    _, second = publish(tmp_path, 1, size_bytes=10)

    class Hangs(World):
        async def delays(self, boot: VLLM) -> None:
            if self.boots.index(boot) < 2 and boot.member == ENGINES[1]:
                await asyncio.Event().wait()

    async def story(world: World) -> None:
        while len(world.boots) < 2:
            await asyncio.sleep(0.01)
        world.comes_up.set()  # both at once
        await world.until(lambda one: one.policy == first.label)  # its sibling
        world.wanted = second
        said = await both_hold(world, second.label)
        assert [boot.member for boot in world.boots].count(ENGINES[1]) == 2
        assert said[ENGINES[0]].boot_id in {boot.boot_id for boot in world.boots[:2]}

    def slow() -> Hangs:
        world = Hangs(store, tmp_path / "work", first, SHARES)
        world.comes_up.clear()
        return world

    monkeypatch.setattr(node_agent, "LATE_S", 0.1)
    run_agent(slow, story, monkeypatch)


def test_an_engine_whose_sibling_fails_at_once_has_all_the_time_that_its_load_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, wanted = publish(tmp_path, 0, size_bytes=10)

    class OneFails(World):
        async def delays(self, boot: VLLM) -> None:
            if boot.member == ENGINES[1]:
                raise ServerFailed("it is gone")
            while len(self.boots) < 3:
                await asyncio.sleep(0.01)

    async def story(world: World) -> None:
        for engine in world.agent._engines:
            engine._bare = False
        while len(world.boots) < 2:
            await asyncio.sleep(0.01)
        world.comes_up.set()  # both at once
        said = await world.until(lambda one: one.policy == wanted.label)
        assert said.boot_id in {boot.boot_id for boot in world.boots[:2]}

    def slow() -> OneFails:
        world = OneFails(store, tmp_path / "work", wanted, SHARES)
        world.comes_up.clear()
        return world

    monkeypatch.setattr(node_agent, "LATE_S", 0.0)
    run_agent(slow, story, monkeypatch)


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


def test_the_end_of_one_engines_processes_is_not_that_of_anothers() -> None:
    sleeps = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
    boots = [
        subprocess.Popen(sleeps, env={**os.environ, "BOOT": name}, stdout=subprocess.PIPE) for name in ("a", "b")
    ]
    for boot in boots:
        assert boot.stdout is not None
        boot.stdout.readline()
    end_descendants(0.0, marked=("BOOT", "a"))
    assert psutil.Process(boots[1].pid).status() != psutil.STATUS_ZOMBIE
    assert boots[0].wait(timeout=HANG_S) != 0
    boots[1].kill()
    boots[1].wait()


def test_a_process_between_two_programs_still_belongs_to_its_boot(tmp_path: Path) -> None:
    again = tmp_path / "again.sh"
    again.write_text(f"exec sh {again}")
    process = subprocess.Popen(["sh", again], env={**os.environ, "BOOT": str(tmp_path)})
    try:
        found = (_descendants(("BOOT", str(tmp_path))) for _ in range(300))
        assert all([one.pid for one in living] == [process.pid] for living in found)
    finally:
        process.kill()
        process.wait()
