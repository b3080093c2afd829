"""The base model by way of the run's store: once from the hub, then for all, and never half of it."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.backends import BytesLike
from grpo_orch.checkpoint.store.errors import StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import chunks
from grpo_orch.policies.model.node_contract import ATTEMPT_ENV, NODE_ENV, RUN_ENV, TOKEN_ENV, WORKDIR_ENV
from grpo_orch.policies.model.spec import Dataset, RolloutSpec, RunSpec, TrainerSpec
from grpo_orch.policies.serving.joining import BASE_MODEL, ENGINE, Stage
from grpo_orch.policies.weights.tensors import Tensor
from grpo_orch.tasks.machine.base_model import INDEX, TENSORS, tensors_in
from grpo_orch.tasks.machine.node_env import NodeEnv
from grpo_orch.tasks.models import hub, shared
from grpo_orch.tasks.models.base import (
    FOLDER,
    BaseModel,
    BaseModelClosed,
    Source,
    found_here,
    source_of,
    with_model,
)
from grpo_orch.tasks.rollout.compile_caches import FOLDERS
from grpo_orch.tasks.rollout.engine_files import EngineFiles
from grpo_orch.tasks.rollout.vllm import flags as vllm_flags
from grpo_orch.tasks.trainer import main
from grpo_orch.tasks.trainer.main import fetch_base_model
from tests.budget import HANG_S
from tests.rigs.rollout_machine import Machine

GATED = Source("own/gated", None, None, is_shared=True)
SHARDS = {"model-1.safetensors": ["a", "b"], "model-2.safetensors": ["c"]}
WANTED = {"config.json", "tokenizer.json", "merges.txt", "model.safetensors.index.json", *SHARDS}


def weights_file(names: list[str], rows: int = 4096) -> bytes:
    size = 4 * rows
    places = {name: [size * at, size * (at + 1)] for at, name in enumerate(names)}
    header = {name: {"dtype": "BF16", "shape": [rows, 2], "data_offsets": place} for name, place in places.items()}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(random.Random(name).randbytes(size) for name in names)


def from_the_hub(folder: Path) -> Path:
    """A snapshot as the hub's client leaves it, with what no run needs."""
    (folder / "original").mkdir(parents=True)
    index = {"weight_map": {name: file for file, names in SHARDS.items() for name in names}}
    texts = {
        "config.json": "{}",
        "tokenizer.json": "{}",
        "merges.txt": "a b",
        "model.safetensors.index.json": json.dumps(index),
        "modeling_own.py": "raise SystemExit",
        "pytorch_model.bin": "a pickle",
        "params.json": "{}",
        "README.md": "#",
        "original/consolidated.safetensors": "twice",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    for name, names in SHARDS.items():
        (folder / name).write_bytes(weights_file(names))
    return folder


def base(store: Store, workdir: Path, **settings: Any) -> BaseModel:
    workdir.mkdir(parents=True, exist_ok=True)
    return BaseModel(store, settings.pop("source", GATED), workdir, {}, 900.0, **settings)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4096)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store((tmp_path / "store").as_uri())


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    return from_the_hub(tmp_path / "hub")


@pytest.fixture
def published(store: Store, snapshot: Path) -> Store:
    shared.publish(store, GATED.model, None, snapshot, 1.0)
    return store


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whom the hub is asked for; without a token it gives nothing."""
    names: list[str] = []

    def fetch(model: str, *_: Any) -> Path:
        names.append(model)
        raise hub.DownloadFailed("GatedRepoError: 401")

    monkeypatch.setattr(hub, "fetch", fetch)
    return names


def test_fetched_model_reaches_others_by_store_without_token(
    store: Store, snapshot: Path, tmp_path: Path, asked: list[str]
) -> None:
    said = list[Stage]()
    assert base(store, tmp_path / "early").whole() is None
    assert asked == ["own/gated"]
    assert shared.publish(store, GATED.model, None, snapshot, 1.0)
    assert not shared.publish(store, GATED.model, None, snapshot, 2.0)

    whole = base(store, tmp_path / "node", report_progress=said.append).whole()
    assert whole is not None
    assert {path.name for path in whole.iterdir()} == WANTED | {TENSORS}
    for name in WANTED:
        assert (whole / name).read_bytes() == (snapshot / name).read_bytes()
    assert (said[-1].name, said[-1].done_bytes) == (BASE_MODEL, said[-1].total_bytes)
    assert [one.done_bytes for one in said] == sorted(one.done_bytes for one in said)
    assert found_here(tmp_path / "node") == whole
    again = base(Store("memory://nothing"), tmp_path / "node")
    assert again.whole() == again.outline() == whole, "a restart finds what is here"
    assert asked == ["own/gated"], "the hub was asked by the first alone"
    assert base(store, tmp_path / "other", source=replace(GATED, revision="v2")).whole() is None
    assert asked == ["own/gated"] * 2, "another revision is another model"


def test_node_without_need_of_weights_gets_names_and_shapes(
    published: Store, snapshot: Path, tmp_path: Path
) -> None:
    outline = base(published, tmp_path / "node").outline()
    assert outline is not None
    assert {path.name for path in outline.iterdir()} == {one for one in WANTED if "model-" not in one} | {TENSORS}
    assert tensors_in(outline) == tensors_in(snapshot) == dict.fromkeys("abc", Tensor("BF16", (4096, 2)))
    assert found_here(tmp_path / "node") is None


class Failing(Store):
    """Takes so many objects, then none; remembers those that it took."""

    def __init__(self, url: str, takes: int) -> None:
        super().__init__(url, retry_s=0.0)
        self.takes, self.taken = takes, list[str]()
        self._one_at_a_time = threading.Lock()

    def put(self, key: str, data: BytesLike) -> None:
        self._take(key, lambda: super(Failing, self).put(key, data))

    def create(self, key: str, data: BytesLike) -> None:
        self._take(key, lambda: super(Failing, self).create(key, data))

    def _take(self, key: str, write: Callable[[], None]) -> None:
        with self._one_at_a_time:
            if len(self.taken) == self.takes:
                raise StoreUnavailable("the machine is gone")
            write()
            self.taken.append(key)


@pytest.mark.parametrize("index", [b"", b"[]", b"{}", b'{"weight_map": null}', b'{"weight_map": {"a": "\xff"}}'])
def test_damaged_index_of_a_model_is_a_value_error(tmp_path: Path, index: bytes) -> None:
    (tmp_path / INDEX).write_bytes(index)
    with pytest.raises(ValueError):
        tensors_in(tmp_path)


def test_partial_upload_is_never_seen_and_next_sends_the_rest(snapshot: Path, tmp_path: Path) -> None:
    whole = Failing((tmp_path / "whole").as_uri(), 1000)
    assert shared.publish(whole, GATED.model, None, snapshot, 1.0)
    everything = len(whole.taken)
    assert everything > 10
    assert whole.taken[-1].endswith(layout.MANIFEST)
    for takes in range(everything):
        url = (tmp_path / f"cut-{takes}").as_uri()
        cut = Failing(url, takes)
        with pytest.raises(StoreUnavailable):
            shared.publish(cut, GATED.model, None, snapshot, 1.0)
        assert shared.find(Store(url), GATED.model, None) is None
        rest = Failing(url, 1000)
        assert shared.publish(rest, GATED.model, None, snapshot, 2.0)
        assert not set(cut.taken) & set(rest.taken), "what is there is not sent again"
        assert len(cut.taken) + len(rest.taken) <= everything + chunks.TRANSFERS
        assert base(Store(url), tmp_path / f"node-{takes}").whole() is not None


def test_a_damaged_object_sends_a_node_to_the_hub(
    published: Store, snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = shared.place_of(GATED.model, None)
    chunk = next(entry.key for entry in published.entries(place) if entry.size_bytes == 4096)
    published.put(chunk, bytes(4096))
    monkeypatch.setattr(hub, "fetch", lambda *_: snapshot)
    assert base(published, tmp_path / "node").whole() == snapshot
    assert not (tmp_path / "node" / FOLDER).exists()


def test_fetched_model_is_not_fetched_for_the_next_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the store either, which has it by then: the disk has room for one."""
    store = Store((tmp_path / "store").as_uri())
    snapshot, asked = from_the_hub(tmp_path / "hub"), list[str]()

    def fetch(model: str, *_: Any) -> Path:
        asked.append(model)
        return snapshot

    monkeypatch.setattr(hub, "fetch", fetch)
    node = base(store, tmp_path / "node")
    assert node.whole() == snapshot
    shared.publish(store, GATED.model, None, snapshot, 1.0)
    assert node.outline() == node.whole() == snapshot
    assert asked == ["own/gated"]
    assert list((tmp_path / "node").iterdir()) == []


def test_weights_in_other_formats_are_left_to_their_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text("{}")
    monkeypatch.setattr(hub, "fetch", lambda *_: tmp_path / "pickled")
    store = Store((tmp_path / "store").as_uri())
    assert base(store, tmp_path / "node").whole() is None
    assert not shared.publish(store, GATED.model, None, tmp_path / "pickled", 1.0)


def test_close_ends_running_transfers(published: Store, tmp_path: Path) -> None:
    one = base(published, tmp_path / "node")
    one.close()
    with pytest.raises(BaseModelClosed):
        one.whole()
    assert found_here(tmp_path / "node") is None


def run_of(workdir: Path, **given: Any) -> RunSpec:
    trainer = TrainerSpec(model=given.pop("model", "own/gated"), dataset=Dataset(path="d"), reward_funcs=())
    return RunSpec(name="t", storage="s3://b/r", trainer=trainer, grpo={}, workdir=str(workdir), **given)


@pytest.mark.parametrize(
    ("given", "settings", "expected"),
    [
        ({"cloud": "sky"}, {}, GATED),
        ({"cloud": "sky"}, {"revision": "v2"}, replace(GATED, revision="v2")),
        ({}, {}, replace(GATED, is_shared=False)),
        ({"cloud": "sky"}, {"trust_remote_code": True}, None),
        ({"cloud": "sky", "model": "here"}, {}, None),
        ({"cloud": "sky", "model": "/mnt/model"}, {}, None),
    ],
)
def test_models_that_come_through_the_store(
    given: dict[str, Any], settings: dict[str, Any], expected: Source | None, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    assert source_of(run_of(tmp_path, **given), settings) == expected


def test_trainer_reads_json_model_options_too(tmp_path: Path) -> None:
    run = replace(run_of(tmp_path), grpo={"model_init_kwargs": '{"trust_remote_code": true}'})
    fetch_base_model(tmp_path, run, Store("memory://json"), lambda _: None, None)  # it is for nobody to fetch


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"revision": "v2", "download_dir": "/big"}, Source("own/gated", "v2", "/big", is_shared=True)),
        ({"load-format": "gguf"}, None),
        ({"trust-remote-code": True}, None),
    ],
)
def test_vllms_flags_decide_for_rollout_nodes(
    flags: dict[str, Any], expected: Source | None, tmp_path: Path
) -> None:
    spec = run_of(tmp_path, cloud="sky", rollout=RolloutSpec(vllm=flags))
    assert vllm_flags.source(spec) == expected


def test_with_the_folder_everything_reads_the_model_there(tmp_path: Path) -> None:
    folder = from_the_hub(tmp_path / FOLDER)
    spec = with_model(run_of(tmp_path), folder)
    assert vllm_flags.model_of(spec) == str(folder)
    assert vllm_flags.base_folder(spec) == folder
    assert vllm_flags.base_bytes(spec) == sum((folder / name).stat().st_size for name in SHARDS)
    assert str(folder) in vllm_flags.argv_of(spec, "127.0.0.1", 1, None)


def test_engine_needing_weights_does_not_start_without_them(
    published: Store, tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of them is damaged in the published, and the hub gives none: vLLM asks it, and says why not."""
    place = shared.place_of(GATED.model, None)
    published.put(next(one.key for one in published.entries(place) if one.size_bytes == 4096), bytes(4096))
    env = NodeEnv(published.url, "rollout-0-i1", "token", 1, 0, str(tmp_path / "node"), "127.0.0.1")
    run = run_of(tmp_path, cloud="sky")
    # Else the compile cache asks the hub for the configuration, as the next does.
    own_cache = replace(run.rollout, env={name: str(tmp_path) for name in FOLDERS})
    here = EngineFiles(env, replace(run, rollout=own_cache), published)
    monkeypatch.setattr(vllm_flags, "base_bytes", lambda _: 0)
    spec, bare = asyncio.run(here.prepare(may_be_bare=False))
    assert (spec.trainer.model, bare, asked) == (GATED.model, False, [GATED.model])


@pytest.mark.parametrize("bare", [True, False])
async def test_agent_brings_model_before_vllm_and_reports_progress(
    machine: Machine, snapshot: Path, monkeypatch: pytest.MonkeyPatch, bare: bool
) -> None:
    shared.publish(machine.store, GATED.model, None, snapshot, 1.0)
    first, told, bring = threading.Event(), threading.Event(), shared.download

    def held_up(*args: Any, **kwargs: Any) -> None:
        bring(*args, **kwargs)
        first.set()
        assert told.wait(HANG_S)

    def seen() -> bool:
        return any(one.name == BASE_MODEL and one.done_bytes for one in machine.stages)

    monkeypatch.setattr(shared, "download", held_up)
    machine.comes_up.clear()
    machine.timing = replace(machine.timing, stage_s=0.01)
    trainer = replace(machine.spec.trainer, model=GATED.model)
    machine.spec = replace(machine.spec, cloud="sky", trainer=trainer)
    machine.start(machine.publish(0), bare=bare)
    agent = machine.agent
    await machine.eventually(lambda: first.is_set() and seen())
    assert machine.boots == []
    told.set()
    await machine.eventually(lambda: machine.boots)
    assert machine.boots[0].bare is bare
    assert (Path(agent.files.spec.trainer.model).name == FOLDER) is not bare
    assert agent.files.stage == Stage(ENGINE, 0, vllm_flags.base_bytes(agent.files.spec))
    machine.comes_up.set()
    await machine.eventually(lambda: len(machine.boots) == 2 or not bare)  # its policy is another model's
    assert Path(agent.files.spec.trainer.model).name == FOLDER


def test_trainer_publishes_a_model_missing_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real process, which has its own size of chunks. A second trainer's machine publishes nothing."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 16 << 20)
    store = Store((tmp_path / "store").as_uri())
    snapshot, begun = from_the_hub(tmp_path / "hub"), list[subprocess.Popen[bytes]]()
    monkeypatch.setattr(hub, "fetch", lambda *_: snapshot)
    begin = shared.begin_publishing
    monkeypatch.setattr(shared, "begin_publishing", lambda *given: begun.append(begin(*given)))
    for name, value in {RUN_ENV: store.url, NODE_ENV: "trainer-0-i1", TOKEN_ENV: "t", ATTEMPT_ENV: "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(WORKDIR_ENV, str(tmp_path))

    def starts(machine: str, checkpoints: Path | None = None, **given: Any) -> None:
        workdir = tmp_path / machine
        workdir.mkdir()
        main.fetch_base_model(workdir, run_of(tmp_path, **given), store, lambda _: None, checkpoints)

    starts("local")
    starts("folder", cloud="sky", model="/mnt/model")
    assert begun == []
    starts("first", cloud="sky")
    assert begun[0].wait(HANG_S) == 0
    assert shared.find(store, GATED.model, None) is not None
    monkeypatch.setattr(hub, "fetch", lambda *_: pytest.fail("the store has it"))
    starts("second", cloud="sky")
    assert found_here(tmp_path / "second") is not None
    assert len(begun) == 1
    starts("restored", cloud="sky", checkpoints=snapshot)
    assert begun[1].wait(HANG_S) == 0, "that it is there is found out"
