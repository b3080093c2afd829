"""A trainer's weights, its publishers, a store that fails where it is told to, and nodes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import manifest
from grpo_orch.checkpoint.weights import delta
from grpo_orch.policies.model.vocabulary import PolicyVersion, Precedence
from grpo_orch.policies.serving.wire import PolicyRef
from grpo_orch.policies.weights.tensors import ServedTypes
from grpo_orch.tasks.rollout.policy_folders import PolicyFolders
from grpo_orch.tasks.storing.publish import PolicyPublisher
from grpo_orch.tasks.storing.step_costs import StepCosts
from tests.budget import HANG_S

Tensors = dict[str, torch.Tensor]
FIRST, SECOND, FORKED = (0, 1, 1), (0, 1, 2), (1, 1, 3)


class Model:
    """A model's configuration, as far as a publisher asks for it."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")


class Watched(Store):
    """A store that counts what is read, and fails at the puts that `fails` names."""

    def __init__(self, url: str) -> None:
        super().__init__(url, retry_s=0.0)
        self.read: list[str] = []
        self.fails: Callable[[str], bool] = lambda _: False

    def get_buffer(self, key: str) -> memoryview:
        self.read.append(key)
        return super().get_buffer(key)

    def put(self, key: str, data: Any) -> None:
        if self.fails(key):
            raise StoreUnavailable("the store is away")
        super().put(key, data)

    def create(self, key: str, data: Any) -> None:
        if self.fails(key):
            raise StoreUnavailable("the store is away")
        super().create(key, data)


class World:
    """A trainer's weights, its publishers and a node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Watched(f"memory://{folder}")
        self.costs = StepCosts()
        self.nodes = 0
        self.made: dict[str, Tensors] = {}  # by label
        self.draw = torch.Generator().manual_seed(7)
        self.weights: Tensors = {
            "model.embed_tokens.weight": torch.randn(400, 32, generator=self.draw),
            "model.norm.weight": torch.randn(32, generator=self.draw),
            "none": torch.zeros(0, 4),
            "packed": torch.zeros(4, 8, dtype=torch.int8),
        }

    def step(self, share: float = 0.01) -> None:
        """Change about that share of the weights."""
        for name, one in self.weights.items():
            if one.is_floating_point():
                hit = torch.rand(one.shape, generator=self.draw) < share
                self.weights[name] = torch.where(hit, one + 1.0, one)

    def publisher(
        self, by: Precedence = FIRST, served: ServedTypes | None = None, machine: str = ""
    ) -> PolicyPublisher:
        """One on a machine of its own, where none is named."""
        scratch = self.folder / (machine or "-".join(map(str, by)))
        return PolicyPublisher(self.store, Model(), scratch, by, served or ServedTypes(), self.costs)

    def publish(self, publisher: PolicyPublisher, step: int, timeline: int = 0) -> PolicyRef:
        ref = publisher.publish(PolicyVersion(timeline, step), self.weights.items(), None)
        settle(publisher)
        self.made[ref.label] = dict(self.weights)
        return ref

    def steps(self, publisher: PolicyPublisher, *steps: int) -> list[PolicyRef]:
        refs = []
        for step in steps:
            self.step()
            refs.append(self.publish(publisher, step))
        return refs

    def left(self) -> list[str]:
        """The folders of the policies that the store holds."""
        keys = [entry.key for entry in self.store.entries(layout.POLICIES)]
        return sorted({key.removeprefix("policies/").rpartition("/")[0] for key in keys})

    def node(self) -> PolicyFolders:
        self.nodes += 1
        return PolicyFolders(self.store, self.root)

    @property
    def root(self) -> Path:
        return self.folder / f"node-{self.nodes}"

    def fetch(self, node: PolicyFolders, ref: PolicyRef) -> Path:
        """Have the node fetch it; what it gets must be what was published."""
        folder = node.fetch(ref, lambda: True)
        node.keep_only(folder)
        check(folder, self.made[ref.label])
        assert [one.name for one in folder.parent.iterdir()] == [ref.label]
        return folder

    def whole_bytes(self) -> int:
        """How many bytes of whole weights have been read since the last time."""
        chunks = {
            f"{found.root}/{chunk}"
            for entry in self.store.entries(layout.POLICIES)
            if entry.key.endswith((layout.MANIFEST, layout.SNAPSHOT))
            for prefix, _, name in [entry.key.rpartition("/")]
            for found in [manifest.load(self.store, prefix, name)]
            for file in found.files
            if file.name == layout.MODEL
            for chunk in file.chunks
        }
        read, self.store.read = self.store.read, []
        return sum(1 for key in read if key in chunks)


def check(folder: Path, wanted: Tensors) -> None:
    held = load_file(folder / layout.MODEL)
    assert held.keys() == wanted.keys()
    for name, one in wanted.items():
        assert torch.equal(held[name], one), name
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", layout.MODEL]


def kind(world: World, ref: PolicyRef) -> str:
    """The kind, and whether a delta is there."""
    found = manifest.load(world.store, ref.prefix)
    return found.meta[manifest.KIND] + ("+" if any(one.name == delta.NAME for one in found.files) else "")


def snapshots(world: World) -> list[str]:
    """The places of policies that have one."""
    keys = [one.key for one in world.store.entries(layout.POLICIES) if one.key.endswith(layout.SNAPSHOT)]
    return [key.rpartition("/")[0] for key in keys]


def manifest_there(world: World, prefix: str) -> bool:
    return world.store.get_or_none(f"{prefix}/{layout.MANIFEST}") is not None


def fails(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def always() -> bool:
    return True


def settle(publisher: Any) -> None:
    """Wait for what goes on after a publication."""
    if publisher._snapshot is not None:
        wait([publisher._snapshot[0].stored], timeout=HANG_S)
    publisher._removal.result()
