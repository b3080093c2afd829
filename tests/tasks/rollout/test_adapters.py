"""A look at an adapter's files before an engine is told of them: files made here, byte by byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_orch.policies.model.spec import Dataset, RunSpec, TrainerSpec
from grpo_orch.tasks.machine.base_model import identity_of
from grpo_orch.tasks.rollout.policy_check import PolicyCheck
from grpo_orch.tasks.rollout.vllm.server import PolicyRefused

Q = "model.layers.0.self_attn.q_proj"
A, B = f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight"
Tensors = dict[str, tuple[str, "np.ndarray[Any, Any]"]]


def write(path: Path, tensors: Tensors) -> None:
    """A safetensors file."""
    header, content = {}, b""
    for name, (dtype, numbers) in tensors.items():
        data = numbers.tobytes()
        at = [len(content), len(content) + len(data)]
        header[name] = {"dtype": dtype, "shape": list(numbers.shape), "data_offsets": at}
        content += data
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def base(folder: Path, value: float = 1.0) -> Path:
    write(folder / "model.safetensors", {f"{Q}.weight": ("F32", np.full((6, 4), value, np.float32))})
    (folder / "config.json").write_text("{}")
    return folder


def good() -> Tensors:
    return {A: ("F32", np.ones((2, 4), np.float32)), B: ("F32", np.ones((6, 2), np.float32))}


class World:
    def __init__(self, folder: Path) -> None:
        self.base = base(folder / "base")
        self.folder = folder / "policy"

    def check(self, peft: dict[str, Any] | None) -> PolicyCheck:
        trainer = TrainerSpec(model=str(self.base), dataset=Dataset(path="d"), reward_funcs=(), peft=peft)
        return PolicyCheck(RunSpec(name="t", storage="memory://t", trainer=trainer, grpo={}))

    def publish(self, tensors: Tensors, identity: str = "") -> Path:
        write(self.folder / "adapter_model.safetensors", tensors)
        (self.folder / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4}')
        told = {"model": "base", "identity": identity or identity_of(self.base)}
        (self.folder / "base.json").write_text(json.dumps(told))
        return self.folder


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_whole_adapter_passes(world: World) -> None:
    assert world.check({"r": 2}).verify(world.publish(good())) is None  # it has no canary


def cut(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def header_alone(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:30])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (cut, "is truncated"),
        (header_alone, "unreadable files"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is missing"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json is missing"),
        (lambda folder: (folder / "base.json").unlink(), "base.json is missing"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "is not a mapping"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "unreadable files"),
        (lambda folder: (folder / "adapter_config.json").write_text('{"r": 3}'), "wrong rank"),
        (lambda folder: (folder / "base.json").write_text('{"identity": "abc"}'), "for another base model, abc"),
    ],
)
def test_damage_is_named_and_engine_keeps_its_policy(
    world: World, damage: Callable[[Path], Any], why: str
) -> None:
    folder = world.publish(good())
    damage(folder)
    with pytest.raises(PolicyRefused, match=why) as caught:
        world.check({"r": 2}).verify(folder)
    assert not caught.value.touched


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({A: good()[A]}, f"half of the adapter of {Q}"),
        (
            {**good(), A: ("F32", np.ones((4, 4), np.float32)), B: ("F32", np.ones((6, 4), np.float32))},
            "wrong rank",
        ),
        ({f"x.{name}": one for name, one in good().items()}, "does not belong to an adapter"),
        ({name: ("I8", numbers.astype(np.int8)) for name, (_, numbers) in good().items()}, "quantised weights"),
    ],
)
def test_unsuitable_tensors_never_reach_the_engine(world: World, tensors: Tensors, why: str) -> None:
    with pytest.raises(PolicyRefused, match=why) as caught:
        world.check({"r": 2}).verify(world.publish(tensors))
    assert not caught.value.touched


def test_rank_too_large_for_the_engine_is_refused(world: World) -> None:
    folder = world.publish(good())
    with pytest.raises(PolicyRefused, match="the engine supports at most 1"):
        world.check({"r": 1}).verify(folder)


def test_the_same_shape_trained_on_another_model(world: World, tmp_path: Path) -> None:
    folder = world.publish(good(), identity_of(base(tmp_path / "tuned", 1.01)))
    with pytest.raises(PolicyRefused, match="another base model"):
        world.check({"r": 2}).verify(folder)
    (world.base / "model.safetensors").unlink()  # as where the hub has no such file: then nobody can tell
    assert world.check({"r": 2}).verify(folder) is None


def test_each_kind_of_node_takes_its_own_kind_of_policy(world: World) -> None:
    adapter = world.publish(good())
    for peft in (None, {"r": 2, "use_dora": True}):
        with pytest.raises(PolicyRefused, match="unmerged adapters"):
            world.check(peft).verify(adapter)
        assert world.check(peft).verify(world.base) is None
    with pytest.raises(PolicyRefused, match="not an adapter, which this run's nodes require"):
        world.check({"r": 2}).verify(world.base)
