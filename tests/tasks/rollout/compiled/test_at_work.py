"""A vLLM that does not work with what another node has compiled: it is started without, and others are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.store import layout
from policies.serving.joining import ENGINE, ENGINE_ANEW
from tasks.rollout import base_here, compile_caches, rollout_engine
from tasks.rollout.compile_caches import CompileCaches
from tasks.rollout.vllm.server import PolicyRefused, Server, ServerFailed
from tests.tasks.rollout.compiled.nodes import KERNELS, SECRET, Machines, read, write
from tests.tasks.rollout.test_fitness import World, publish, run_agent


class Home(World):
    """Its agent keeps what is compiled below `kept`."""

    kept: Path
    found: list[bool]

    def has(self) -> bool:
        return self.kept.exists()

    async def start(self, *spec: Any, bare: bool, gpus: str) -> Server:
        self.found.append(self.has())
        return await super().start(*spec, bare=bare, gpus=gpus)


@pytest.fixture
def home(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[[], Home], Path]:
    """A world, and where its agent keeps what is compiled."""
    store, wanted = publish(machines.folder, 0, size_bytes=10)
    monkeypatch.setenv("HOME", str(machines.folder))
    monkeypatch.setattr(compile_caches, "key_of", lambda *_: "key")
    monkeypatch.setattr(rollout_engine, "RESTART_WAIT_S", 0.0)

    def world() -> Home:
        one = Home(store, machines.folder / "work", wanted)
        one.kept, one.found = machines.folder / base_here.COMPILED / "key", []
        return one

    return world, machines.folder / base_here.COMPILED / "key"


@pytest.mark.parametrize("fails", ["start", "load"])
def test_a_vllm_that_fails_with_what_was_brought_is_started_without_it(
    home: tuple[Callable[[], Home], Path], fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, kept = home
    write(kept, KERNELS)

    async def story(world: Any) -> None:
        def does(_: str) -> None:
            if fails == "load" and world.has():
                raise PolicyRefused("computes something else", touched=True)

        world.does = does
        await world.until(lambda one: one.policy == world.wanted.label)
        assert world.found == [True, False]

    async def start(world: Home, *spec: Any, bare: bool, gpus: str) -> Server:
        server = await started(world, *spec, bare=bare, gpus=gpus)
        if fails == "start" and world.has():
            raise ServerFailed("ended with exit code 1")
        return server

    started = Home.start
    monkeypatch.setattr(Home, "start", start)
    run_agent(make, story, monkeypatch)


def test_a_vllm_that_hangs_in_what_was_brought_is_started_without_it_in_a_machines_whole_time(
    home: tuple[Callable[[], Home], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, kept = home
    write(kept, KERNELS)
    monkeypatch.setattr(base_here, "HANGS_SHARE", 1e-4)

    async def story(world: Any) -> None:
        await world.until(lambda one: one.policy == world.wanted.label)
        assert world.found == [True, False]

    async def start(world: Home, *spec: Any, bare: bool, gpus: str) -> Server:
        server = await started(world, *spec, bare=bare, gpus=gpus)
        if world.has():
            await asyncio.Event().wait()
        while world.stages[-1].name != ENGINE_ANEW:  # which the controller counts from anew
            await asyncio.sleep(0.01)
        assert ENGINE in {one.name for one in world.stages}
        return server

    started = Home.start
    monkeypatch.setattr(Home, "start", start)
    run_agent(make, story, monkeypatch)


def test_a_vllm_that_ends_at_work_a_second_time_is_started_without_what_was_brought(
    home: tuple[Callable[[], Home], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, kept = home
    write(kept, KERNELS)

    async def story(world: Any) -> None:
        for boots in (1, 2):
            await world.until(lambda one, at=boots: len(world.boots) == at and one.policy == world.wanted.label)
            world.boots[-1].ends.set()
        await world.until(lambda one: len(world.boots) == 3 and one.policy == world.wanted.label)
        assert world.found == [True, True, False]

    run_agent(make, story, monkeypatch)


def test_what_vllm_does_not_work_with_is_replaced_once_it_works(machines: Machines) -> None:
    machines.compiles()
    [place] = machines.places()
    node, folder = machines.node()
    node.bring(machines.spec)
    node = CompileCaches(machines.store, machines.spec, folder.parent, SECRET)  # its agent was started again
    node.bring(machines.spec)
    assert read(folder) == KERNELS
    node.doubt()
    write(folder, {"triton/k": b"its own"})
    node.store()
    assert machines.brought() == KERNELS, "it may have failed for another cause"
    node.works()
    node.store()
    assert machines.places() == [place]
    assert machines.brought() == {"triton/k": b"its own"}


def test_what_is_compiled_is_stored_once_the_node_has_served_for_a_while(
    home: tuple[Callable[[], Home], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, kept = home

    async def story(world: Any) -> None:
        store = world.agent._folders._store
        while not world.boots:
            await asyncio.sleep(0.01)
        write(kept, KERNELS)
        assert store.entries(layout.COMPILED) == []
        world.comes_up.set()
        await world.until(lambda one: one.policy == world.wanted.label)
        await world.until(lambda _: bool(store.entries(layout.COMPILED)))

    def slow() -> Home:
        world = make()
        world.comes_up.clear()
        return world

    monkeypatch.setattr(compile_caches, "SERVED_S", 0.0)
    run_agent(slow, story, monkeypatch)
