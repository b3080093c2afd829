"""What one node has compiled and another uses: for the same key, as it was written, by who knows the secret.

A vLLM that does not work with it is started without, and the other nodes hear of that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.security.vouched import MAC_BYTES, seal
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.serving.joining import ENGINE, ENGINE_UNCACHED
from grpo_orch.tasks.rollout import compile_caches, engine_files
from grpo_orch.tasks.rollout.compile_caches import FOLDERS, CompileCaches
from grpo_orch.tasks.rollout.vllm.server import PolicyRefused, ServerFailed
from tests.rigs.rollout_machine import Boot, Machine, spec_of

SECRET = "the run's secret"
KERNELS = {"vllm/torch_compile_cache/ab/model": b"graph", "inductor/x/k.so": bytes(range(256)), "triton/e": b""}


class Machines:
    """Nodes of one run, each with a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(f"memory://{folder}", retry_s=0.0)
        for model in ("model", "another"):
            write(folder / model, {"config.json": b"{}"})
        self.spec = spec_of(folder)
        self.count = 0

    def node(self, spec: RunSpec | None = None, secret: str = SECRET) -> tuple[CompileCaches, Path]:
        self.count += 1
        root, spec = self.folder / str(self.count), spec or self.spec
        return CompileCaches(self.store, spec, root, secret), root / str(compile_caches.key_of(spec, {}))

    def compiles(self, spec: RunSpec | None = None, secret: str = SECRET) -> None:
        """A node starts, finds nothing, compiles and stores it."""
        node, folder = self.node(spec, secret)
        node.restore(spec or self.spec)
        assert not folder.exists()
        write(folder, KERNELS)
        node.store()

    def brought(self, spec: RunSpec | None = None) -> dict[str, bytes]:
        node, folder = self.node(spec)
        node.restore(spec or self.spec)
        return read(folder)

    def places(self) -> list[str]:
        return [entry.key for entry in self.store.entries(layout.COMPILED)]


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def read(folder: Path) -> dict[str, bytes]:
    assert not list(folder.parent.glob(".*")), "nothing half done is left"
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)
    return Machines(tmp_path)


def test_second_node_starts_with_the_firsts_compile_cache(machines: Machines) -> None:
    machines.compiles()
    node, folder = machines.node()
    spec = node.restore(machines.spec)
    assert read(folder) == KERNELS
    assert {name: Path(spec.rollout.env[name]).relative_to(folder).name for name in FOLDERS} == FOLDERS
    node.store()  # what it was brought it does not send back
    (folder / "own").write_bytes(b"compiled since")
    CompileCaches(machines.store, machines.spec, folder.parent, SECRET).restore(machines.spec)
    assert read(folder) == KERNELS | {"own": b"compiled since"}, "a restart on the machine keeps what is there"
    assert len(machines.places()) == 1


def test_model_at_different_paths_is_linked_to_one_path(machines: Machines) -> None:
    """As one that comes through the store, without its weights or with them; vLLM's own keys name its path."""
    found = list[str]()
    for folder in ("i1/base-model", "i2/base-outline"):
        write(machines.folder / folder, {"config.json": b"{}"})
        of = replace(machines.spec.trainer, model=str(machines.folder / folder))
        node = CompileCaches(machines.store, machines.spec, machines.folder / "root", SECRET)
        here = node.restore(replace(machines.spec, trainer=of))
        assert Path(here.trainer.model).resolve() == machines.folder / folder
        found.append(here.trainer.model)
    assert found[0] == found[1]


def test_compile_cache_of_an_earlier_run_is_shared(machines: Machines) -> None:
    node, folder = machines.node()
    write(folder, KERNELS)
    node.restore(machines.spec)
    node.store()
    assert machines.brought() == KERNELS


def test_of_two_that_compile_at_once_the_first_to_store_it_stays(machines: Machines) -> None:
    found = [machines.node() for _ in range(2)]
    for number, (node, folder) in enumerate(found):
        node.restore(machines.spec)
        write(folder, {"triton/who": str(number).encode()})
    for node, _ in found:
        node.store()
    assert machines.brought() == {"triton/who": b"0"}
    assert len(machines.places()) == 1


@pytest.mark.parametrize(
    "differs", ["environment", "processor", "accelerator_models", "flags", "env", "model", "adapters"]
)
def test_nothing_is_used_of_another_key(machines: Machines, monkeypatch: pytest.MonkeyPatch, differs: str) -> None:
    machines.compiles()
    spec, rollout = machines.spec, machines.spec.rollout
    match differs:
        case "flags":
            spec = replace(spec, rollout=replace(rollout, vllm={**rollout.vllm, "tensor-parallel-size": 2}))
        case "env":
            spec = replace(spec, rollout=replace(rollout, env={"VLLM_ATTENTION_BACKEND": "x"}))
        case "model":
            spec = replace(spec, trainer=replace(spec.trainer, model="another"))
        case "adapters":
            spec = replace(spec, trainer=replace(spec.trainer, peft={"r": 8}))
        case part:
            monkeypatch.setattr(compile_caches, part, lambda: "another")
    assert machines.brought(spec) == {}


# What is found at a place, made of the place and of what was written there.
DAMAGE: dict[str, Callable[[str, bytes], bytes]] = {
    "nothing in it": lambda *_: b"",
    "a bit": lambda _, good: good[:-1] + bytes([good[-1] ^ 1]),
    "its end": lambda _, good: good[:-1],
    "without a seal": lambda _, good: good[MAC_BYTES:],
    "another's seal": lambda place, good: seal("another secret", place, good[MAC_BYTES:]),
    "of another place": lambda _, good: seal(SECRET, layout.compiled("f" * 32), good[MAC_BYTES:]),
    "no archive": lambda place, _: seal(SECRET, place, b"no archive"),
    "cut before it was sealed": lambda place, good: seal(SECRET, place, good[MAC_BYTES : len(good) // 2]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_or_hostile_cache_is_replaced(machines: Machines, damage: str) -> None:
    machines.compiles()
    [place] = machines.places()
    machines.store.put(place, DAMAGE[damage](place, machines.store.get(place)))
    assert machines.brought() == {}
    machines.compiles()
    assert machines.places() == [place]
    assert machines.brought() == KERNELS


def test_too_large_locked_or_linked_files_are_not_stored(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit_bytes, stored in ((4, {}), (5, {"vllm/model": b"whole"})):
        monkeypatch.setattr(compile_caches, "UNPACKED_BYTES_MAX", limit_bytes)
        node, folder = machines.node()
        node.restore(machines.spec)
        write(folder, {"triton/k.lock": b"", "vllm/model.17.tmp": b"half", "vllm/model": b"whole"})
        (folder / "link").symlink_to("/etc/passwd")
        node.store()
        assert machines.brought() == stored


@pytest.mark.parametrize("when", ["entries", "get_buffer", "create"])
def test_a_store_that_fails_costs_a_compilation(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("the store is away")

    if when == "get_buffer":
        machines.compiles()
    with monkeypatch.context() as patch:
        patch.setattr(Store, when, away)
        node, folder = machines.node()
        assert node.restore(machines.spec).rollout.env.keys() == FOLDERS.keys()
        write(folder, KERNELS)
        node.store()
    assert read(folder) == KERNELS


@pytest.mark.parametrize("why", ["named in run.yaml", "named here", "nothing is compiled", "AMD", "no folder"])
def test_no_request_is_made_where_nothing_can_be_shared(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str
) -> None:
    rollout = machines.spec.rollout
    match why:
        case "named in run.yaml":
            rollout = replace(rollout, env={"TRITON_CACHE_DIR": "/image/triton"})
        case "named here":
            monkeypatch.setenv("VLLM_CACHE_ROOT", "/image/vllm")
        case "nothing is compiled":
            env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            rollout = replace(rollout, vllm={"enforce-eager": True}, env=env)
        case "AMD":
            monkeypatch.setattr(compile_caches, "AMD", tmp_path)
        case "no folder":
            (tmp_path / "1").write_bytes(b"a file")
    spec = replace(machines.spec, rollout=rollout)
    node, folder = machines.node(spec)
    assert node.restore(spec) == spec
    if why != "no folder":
        write(folder, KERNELS)
    node.store()
    assert machines.places() == []


def test_cache_that_fails_vllm_is_replaced_once_it_works(machines: Machines) -> None:
    machines.compiles()
    [place] = machines.places()
    node, folder = machines.node()
    node.restore(machines.spec)
    node = CompileCaches(machines.store, machines.spec, folder.parent, SECRET)  # its agent was started again
    node.restore(machines.spec)
    assert read(folder) == KERNELS
    node.discard()
    write(folder, {"triton/k": b"its own"})
    node.store()
    assert machines.places() == [place]
    assert machines.brought() == {"triton/k": b"its own"}


@pytest.fixture
def kept(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the agent keeps what is compiled."""
    monkeypatch.setenv("HOME", str(machines.folder))
    monkeypatch.setattr(compile_caches, "key_of", lambda *_: "key")
    return machines.folder / engine_files.COMPILED / "key"


@pytest.mark.parametrize("fails", ["start", "load", "start hangs", "second end"])
async def test_vllm_failing_with_a_restored_cache_starts_without(
    machine: Machine, kept: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """One that hangs has a share of the machine's time: the controller counts from the next start again."""
    found = list[bool]()

    async def on_start(_: Boot) -> None:
        found.append(kept.exists())
        if found[-1] and fails == "start":
            raise ServerFailed("ended with exit code 1")
        if found[-1] and fails == "start hangs":
            await asyncio.Event().wait()
        if fails == "start hangs":
            await machine.eventually(lambda: machine.stages[-1].name == ENGINE_UNCACHED)
            assert ENGINE in {stage.name for stage in machine.stages}

    async def on_load(_: Boot) -> None:
        if found[-1] and fails == "load":
            raise PolicyRefused("computes something else", touched=True)

    if fails == "start hangs":
        monkeypatch.setattr(engine_files, "RESTORED_CACHE_SHARE", 1e-4)
    write(kept, KERNELS)
    wanted, machine.on_start, machine.on_load = machine.publish(0), on_start, on_load
    machine.start(wanted)
    if fails == "second end":
        for boots in (1, 2):
            await machine.eventually(lambda at=boots: len(found) == at)  # type: ignore[misc]
            await machine.holds(wanted)
            machine.boots[-1].ends.set()
    await machine.until(lambda one: found[-1] is False and one.policy == wanted.label)
    assert found == [True] * (2 if fails == "second end" else 1) + [False]


async def test_compile_cache_is_stored_after_serving_for_a_while(
    machine: Machine, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_files, "SERVED_S", 0.0)
    wanted = machine.publish(0)
    machine.comes_up.clear()
    machine.start(wanted)
    await machine.eventually(lambda: machine.boots)
    write(kept, KERNELS)
    assert machine.store.entries(layout.COMPILED) == []
    machine.comes_up.set()
    await machine.holds(wanted)
    await machine.eventually(lambda: machine.store.entries(layout.COMPILED))
