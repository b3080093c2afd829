"""A node on its way to its first policy: it is fetched while vLLM starts, which may do so without weights."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoint.store import layout
from checkpoint.store.codec import to_json
from policies.model.spec import RunSpec
from policies.serving.canary import Canary
from policies.serving.joining import ENGINE, POLICY, Stage
from tasks.rollout import rollout_engine
from tasks.rollout.policy_check import PolicyCheck
from tasks.rollout.policy_folders import PolicyFolders
from tasks.rollout.vllm.flags import argv_of
from tasks.rollout.vllm.server import PolicyRefused, Server, ServerFailed, Unfit
from tests.budget import HANG_S
from tests.tasks.rollout.test_fitness import World, publish, run_agent
from tests.tasks.rollout.test_rollout_agent import spec_of


async def until_there(folder: Path) -> None:
    while not folder.is_dir():
        await asyncio.sleep(0.01)


def test_what_is_wanted_is_fetched_while_vllm_starts_and_what_is_wanted_next_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, first = publish(tmp_path, 0, size_bytes=10)
    _, second = publish(tmp_path, 1, size_bytes=1000)

    async def story(world: World) -> None:
        await until_there(tmp_path / "work" / "policies" / first.label)
        world.wanted = second
        await until_there(tmp_path / "work" / "policies" / second.label)
        assert (len(world.boots), world.said, world.loads) == (1, [], [])
        world.comes_up.set()
        said = await world.until(lambda one: one.policy == second.label)
        assert world.loads == [second.label]
        assert said.stages is not None
        assert said.stages.fetched_bytes > 1000  # not those of the second look, which found all there
        assert set(said.join_s) == {"compiled", "vllm", "trial", "fetch", "load", "all"}
        assert said.join_s["all"] >= said.join_s["fetch"] > 0

    def slow() -> World:
        world = World(store, tmp_path / "work", first)
        world.comes_up.clear()
        return world

    run_agent(slow, story, monkeypatch)


def test_while_vllm_starts_the_gateway_is_told_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, wanted = publish(tmp_path, 0, size_bytes=10)

    async def story(world: World) -> None:
        read_bytes = (tmp_path / "work" / "base" / "model.safetensors").stat().st_size
        async with asyncio.timeout(HANG_S):
            while Stage(ENGINE, 0, read_bytes) not in world.stages:
                await asyncio.sleep(0.01)
        world.comes_up.set()
        assert (await world.until(lambda one: one.policy == wanted.label)).stage is None

    def with_weights() -> World:
        world = World(store, tmp_path / "work", wanted)
        world.engine._bare = False
        world.comes_up.clear()
        return world

    run_agent(with_weights, story, monkeypatch)


def test_a_whole_policy_tells_how_far_it_is_while_it_is_fetched(tmp_path: Path) -> None:
    store, wanted = publish(tmp_path, 0, size_bytes=1000)
    folders, seen = PolicyFolders(store, tmp_path / "policies"), list[Stage | None]()

    def still() -> bool:
        seen.append(folders.coming)
        return True

    folders.fetch(wanted, still)
    last = seen[-1]
    assert last is not None
    assert (last.name, last.done_bytes) == (POLICY, last.total_bytes)
    assert last.total_bytes > 1000
    assert folders.coming is None


@pytest.mark.parametrize(
    "error", [ServerFailed("500"), PolicyRefused("no", touched=True), PolicyRefused("no", touched=False)]
)
def test_a_vllm_without_weights_that_does_not_get_them_all_is_started_with_them(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, wanted = publish(tmp_path, 0, size_bytes=10)

    async def story(world: World) -> None:
        def does(_: str) -> None:
            if world.boots[-1].bare:
                raise error

        world.does = does
        said = await world.until(lambda one: one.policy == wanted.label or bool(one.unfit))
        assert (said.policy, said.unfit) == (wanted.label, "")
        assert [boot.bare for boot in world.boots] == [True, False]

    run_agent(lambda: World(store, tmp_path / "work", wanted), story, monkeypatch)


@pytest.mark.parametrize("error", [Unfit("draws anew"), ServerFailed("ended with exit code 1")])
def test_a_vllm_that_does_not_come_up_without_weights_is_started_with_them(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, wanted = publish(tmp_path, 0, size_bytes=10)

    class NotBare(World):
        async def start(self, *spec: Any, bare: bool, gpus: str) -> Server:
            server = await super().start(*spec, bare=bare, gpus=gpus)
            if bare:
                raise error
            return server

    async def story(world: World) -> None:
        await world.until(lambda one: one.policy == wanted.label)
        assert [boot.bare for boot in world.boots] == [True, False]

    monkeypatch.setattr(rollout_engine, "RESTART_WAIT_S", 0.0)
    run_agent(lambda: NotBare(store, tmp_path / "work", wanted), story, monkeypatch)


def test_each_boot_of_vllm_starts_without_weights_as_long_as_that_goes_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, wanted = publish(tmp_path, 0, size_bytes=10)

    async def story(world: World) -> None:
        said = await world.until(lambda one: one.policy == wanted.label)
        await world.boots[0].stop()  # as a crash does
        again = await world.until(lambda one: one.policy == wanted.label and one.boot_id != said.boot_id)
        assert [boot.bare for boot in world.boots] == [True, True]
        assert again.join_s == said.join_s  # of the node, not of the boot

    run_agent(lambda: World(store, tmp_path / "work", wanted), story, monkeypatch)


def tensor_file(names: list[str]) -> bytes:
    tensors = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * at, 4 * at + 4]} for at, name in enumerate(names)
    }
    header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4 * len(names))


def a_run(folder: Path, config: dict[str, Any], names: list[str], flags: dict[str, Any]) -> RunSpec:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    if names:
        (folder / "model" / "model.safetensors").write_bytes(tensor_file(names))
    return spec_of(folder, flags)


BODY = ["model.embed_tokens.weight", "model.layers.0.mlp.weight"]
HEAD = "lm_head.weight"
UNTIED = {"tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("config", "names", "flags", "peft", "covers"),
    [
        (UNTIED, [*BODY, HEAD], {}, None, True),
        ({"tie_word_embeddings": True}, BODY, {}, None, True),
        ({}, BODY, {"enforce_eager": True}, None, True),
        ({"tie_word_embeddings": True}, [*BODY, HEAD], {}, None, False),  # vLLM may make two of them
        (UNTIED, [], {}, None, False),  # what there is to overwrite is not known
        ({**UNTIED, "quantization_config": {}}, [*BODY, HEAD], {}, None, False),
        (UNTIED, [*BODY, HEAD], {"quantization": "fp8"}, None, False),
        (UNTIED, [*BODY, HEAD], {"load_format": "safetensors"}, None, False),
        (UNTIED, [*BODY, HEAD], {"speculative-config": {"model": "small"}}, None, False),
        (UNTIED, [*BODY, HEAD], {}, {"target_modules": ["q_proj"]}, False),  # adapters need what is below them
        (UNTIED, [*BODY, HEAD], {}, {"bias": "all"}, True),  # which is published merged
    ],
)
def test_vllm_starts_without_weights_only_where_a_policy_is_all_that_it_holds(
    config: dict[str, Any],
    names: list[str],
    flags: dict[str, Any],
    peft: dict[str, Any] | None,
    tmp_path: Path,
    *,
    covers: bool,
) -> None:
    spec = a_run(tmp_path, {"architectures": ["LlamaForCausalLM"], **config}, names, flags)
    spec = replace(spec, trainer=replace(spec.trainer, peft=peft))
    assert PolicyCheck(spec).covers_engine() is covers


def test_a_tensor_that_the_trainer_lacks_may_be_missing_only_where_the_engine_has_it(
    tmp_path: Path,
) -> None:
    spec = a_run(tmp_path, UNTIED, [*BODY, HEAD, "mtp.weight"], {})
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "model.safetensors").write_bytes(tensor_file([*BODY, HEAD]))
    canary = Canary([1, 2], [-1.0], "float32", 2, ["^mtp"])
    (policy / layout.CANARY).write_bytes(to_json(canary))
    assert PolicyCheck(spec).passed(policy) == canary
    with pytest.raises(PolicyRefused, match=r"missing tensors: mtp\.weight"):
        PolicyCheck(spec).passed(policy, bare=True)


def test_a_load_format_of_run_yaml_is_kept_and_without_weights_there_is_one(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, {"load-format": "safetensors"})
    assert "safetensors" in argv_of(spec, "127.0.0.1", 1, None)
    assert "dummy" in argv_of(spec_of(tmp_path, {}), "127.0.0.1", 1, None, bare=True)
