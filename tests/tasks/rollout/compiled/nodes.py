"""Nodes of one run, and what they have compiled."""

from __future__ import annotations

from pathlib import Path

from checkpoint.store import layout
from checkpoint.store.run_store import Store
from policies.model.spec import RunSpec
from tasks.rollout import compile_caches
from tasks.rollout.compile_caches import CompileCaches
from tests.tasks.rollout.test_rollout_agent import spec_of

SECRET = "the run's secret"
KERNELS = {"vllm/torch_compile_cache/ab/model": b"graph", "inductor/x/k.so": bytes(range(256)), "triton/e": b""}


class Machines:
    """Nodes of one run, each with a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(f"memory://{folder}", retry_s=0.0)
        for model in ("model", "another"):
            write(folder / model, {"config.json": b"{}"})
        self.spec = spec_of(folder, {})
        self.count = 0

    def node(self, spec: RunSpec | None = None, secret: str = SECRET) -> tuple[CompileCaches, Path]:
        self.count += 1
        root, spec = self.folder / str(self.count), spec or self.spec
        return CompileCaches(self.store, spec, root, secret), root / str(compile_caches.key_of(spec, {}))

    def compiles(self, spec: RunSpec | None = None, secret: str = SECRET) -> None:
        """A node starts, finds nothing, compiles and stores it."""
        node, folder = self.node(spec, secret)
        node.bring(spec or self.spec)
        assert not folder.exists()
        write(folder, KERNELS)
        node.store()

    def brought(self, spec: RunSpec | None = None) -> dict[str, bytes]:
        node, folder = self.node(spec)
        node.bring(spec or self.spec)
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
