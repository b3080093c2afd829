"""Disks that are asked for, disks that are too small, and a hub that says nothing, or nothing in time."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from sky import Resources
from sky.utils import schemas

from grpo_orch.orchestrator.config.load import Loaded, load
from grpo_orch.orchestrator.config.model_size import SizeUnknown, find_size
from grpo_orch.orchestrator.config.problems import ConfigError
from grpo_orch.policies.weights.disk_sizes import ModelSize, gb_of
from tests.budget import HANG_S
from tests.generators.config_world import VALID, furnish
from tests.rigs.store.server import free_port

SKY = VALID[: VALID.index("rehearse:")].replace("storage: ./run", "storage: s3://bucket/run\ncloud: sky")
OF_70B = ModelSize(70_554_000_000, 141_108_000_000, {"dtype": "bfloat16"})
OF_7B = ModelSize(7_616_000_000, 15_232_000_000, {"dtype": "bfloat16"})


def loaded(tmp_path: Path, trainer: str, rollout: str, size: ModelSize | SizeUnknown) -> Loaded:
    def find(_: object) -> ModelSize:
        if isinstance(size, SizeUnknown):
            raise size
        return size

    furnish(tmp_path)
    text = SKY.replace("  model: ./model\n", f"  model: own/model\n  resources: {trainer}\n").replace(
        "  vllm: {dtype: float32,", f"  resources: {rollout}\n  vllm: {{dtype: bfloat16,"
    )
    (tmp_path / "run.yaml").write_text(text)
    return load(tmp_path / "run.yaml", find_size=find)


def disks(found: Loaded) -> tuple[object, object]:
    return found.spec.trainer.resources.get("disk_size"), found.spec.rollout.resources.get("disk_size")


def told(found: Loaded) -> list[str]:
    return [str(one).partition(": ")[2] for one in found.notices if "disk_size" in str(one)]


H100 = "{infra: aws/us-east-1, accelerators: H100:8}"


def test_required_disks_are_requested_if_none_is_named(tmp_path: Path) -> None:
    found = loaded(tmp_path, H100, "{any_of: [{infra: aws/us-east-1}, {infra: gcp/us-central1}]}", OF_70B)
    assert disks(found) == (3490, 540)  # with the base model in what is restored: beta is set
    assert told(found) == [
        "trainer.resources: disk_size is not set, so 3490 GB are requested: "
        "system and environment 60, base model 141, two policies 282, checkpoints 2681",
        "rollout.resources: disk_size is not set, so 540 GB are requested: "
        "system and environment 60, base model 141, two policies 282",
    ]


def test_a_model_that_fits_skypilots_own_disk_asks_for_nothing(tmp_path: Path) -> None:
    found = loaded(tmp_path, H100, "{infra: aws/us-east-1, disk_size: 130GB}", OF_7B)
    assert disks(found) == (440, "130GB")
    assert [one.partition(":")[0] for one in told(found)] == ["trainer.resources"]


def test_too_small_named_disk_is_reported_with_figures(tmp_path: Path) -> None:
    some = "{any_of: [{infra: aws/us-east-1, disk_size: 2TB}, {infra: gcp/us-central1, disk_size: 300}]}"
    found = loaded(tmp_path, "{infra: aws/us-east-1, disk_size: 500}", some, OF_70B)
    assert disks(found) == (500, None)
    assert told(found) == [
        "trainer.resources.disk_size: disk_size is 500 GB, but about 3490 GB are needed: "
        "system and environment 60, base model 141, two policies 282, checkpoints 2681",
        "rollout.resources: disk_size is 300 GB, but about 540 GB are needed: system and environment 60, "
        "base model 141, two policies 282",
    ]


SIZES = [
    *(100, 0, -5, 100.0, 100.5, True, "100", "0", "100+", "100.5", "100 GB", " 100", "100x", "1e3", "", "GB"),
    *(f"{count}{unit}" for count in (1, 1024, 2**20) for unit in ("kb", "Ki", "MB", "mi", "GB", "Gi", "gB", "g")),
    *("1TB", "2Ti", "3pb", "1tB", "1T"),
]


@pytest.mark.parametrize("size", SIZES)
def test_disk_sizes_are_read_as_skypilot_reads_them(size: object) -> None:
    found: int | None = None
    with contextlib.suppress(ValueError, jsonschema.ValidationError):
        jsonschema.validate(size, schemas.get_resources_schema()["properties"]["disk_size"])
        found = Resources(disk_size=size).disk_size
    assert gb_of(size) == found


@pytest.mark.parametrize("size", ["100+", "'100 GB'", "100g", "512MB", "0"])
def test_a_disk_that_skypilot_would_refuse_is_refused_here(size: str, tmp_path: Path) -> None:
    machines = f"{{any_of: [{{infra: aws/us-east-1, disk_size: {size}}}]}}"
    with pytest.raises(ConfigError, match="expected whole GB, such as 500, 500GB or 2TB, got") as caught:
        loaded(tmp_path, machines, H100, OF_7B)
    assert [one.key for one in caught.value.problems] == ["trainer.resources.any_of[0].disk_size"]


@pytest.mark.parametrize("infra", ["k8s/prod", "slurm/cluster", "ssh/pool"])
def test_machines_with_disks_of_their_own_are_asked_for_none(infra: str, tmp_path: Path) -> None:
    found = loaded(tmp_path, f"{{infra: {infra}}}", f"{{infra: {infra}}}", OF_70B)
    assert disks(found) == (None, None)
    said = "rollout.resources: disk_size cannot be requested on these machines, and about 540 GB"
    assert told(found)[1].startswith(said)


def test_unknown_size_is_reported_and_changes_nothing(tmp_path: Path) -> None:
    found = loaded(tmp_path, H100, H100, SizeUnknown("cannot reach the hub: no route"))
    assert disks(found) == (None, None)
    assert told(found) == [
        "trainer.model: the model's size is unknown (cannot reach the hub: no route), so machines get disk_size "
        "of `resources`, or SkyPilot's default of 256 GB"
    ]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "trainer.model"),
        ({"max_position_embeddings": 128}, "rollout.vllm.max-model-len"),
    ],
)
def test_config_json_of_a_hub_model_is_checked(config: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, H100, H100, replace(OF_7B, config=config))
    assert [problem.key for problem in caught.value.problems] == [key]


def test_hub_model_whose_adapter_is_merged_has_a_notice(tmp_path: Path) -> None:
    model = replace(OF_7B, config={"architectures": ["BloomForCausalLM"]})
    found = loaded(tmp_path, f"{H100}\n  peft: {{r: 16, target_modules: [q_proj]}}", H100, model)
    assert "trainer.peft" in {notice.key for notice in found.notices}


def weights_file(names: list[str]) -> bytes:
    tensors = {
        name: {"dtype": "BF16", "shape": [2, 1], "data_offsets": [4 * at, 4 * at + 4]}
        for at, name in enumerate(names)
    }
    header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4 * len(names))


def size_of(model: str, workdir: Path, timeout_s: float = HANG_S) -> ModelSize:
    furnish(workdir)
    (workdir / "run.yaml").write_text(SKY.replace("./model", model))
    return find_size(load(workdir / "run.yaml").spec, timeout_s)


def test_folder_size_is_by_its_files_or_index(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(SizeUnknown, match="no safetensors files and no index"):
        size_of("./model", tmp_path)
    (folder / "config.json").write_text('{"torch_dtype": "float32"}')
    (folder / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 400}, "weight_map": {}}')
    assert size_of("./model", tmp_path) == ModelSize(100, 400, {"torch_dtype": "float32"})
    (folder / "model-1.safetensors").write_bytes(weights_file(["a", "b"]))
    assert size_of("./model", tmp_path) == ModelSize(4, 8, {"torch_dtype": "float32"})
    (folder / "model-2.safetensors").write_bytes(b"<html>")
    with pytest.raises(SizeUnknown):
        size_of("./model", tmp_path)


class Hub(BaseHTTPRequestHandler):
    """The API of the hub, as far as it is asked."""

    answers: dict[str, tuple[int, Any]] = {}  # noqa: RUF012  # set by each test
    drips_s = 0.0  # sends a header after the other for so long

    def do_GET(self) -> None:
        status, said = self.answers.get(self.path, (404, {}))
        body = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        for _ in range(int(self.drips_s / 0.02)):
            self.send_header("Odd", "header")
            self.flush_headers()
            time.sleep(0.02)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield Hub
    Hub.drips_s = 0.0
    server.shutdown()
    server.server_close()


def test_hub_gives_the_size_of_a_model_by_dtype(hub: type[Hub], tmp_path: Path) -> None:
    api, config = "/api/models/own/model", "/own/model/resolve/main/config.json"
    hub.answers = {api: (200, {"safetensors": {"parameters": {"BF16": 30, "F32": 2}}}), config: (200, {"a": 1})}
    assert size_of("own/model", tmp_path) == ModelSize(32, 68, {"a": 1})
    del hub.answers[config]  # a gated model's, without a token
    assert size_of("own/model", tmp_path) == ModelSize(32, 68, {})


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((200, {}), "no safetensors files"),
        ((200, []), "no safetensors files"),
        ((200, {"safetensors": {"parameters": {"BF16": "many"}}}), "no safetensors files"),
        ((200, b"<html>"), "cannot reach the hub"),
        ((401, {}), "is HF_TOKEN set"),
        ((404, {}), "is HF_TOKEN set"),
        ((503, {}), "cannot reach the hub"),
    ],
)
def test_hub_without_size_is_no_error(answer: tuple[int, Any], why: str, hub: type[Hub], tmp_path: Path) -> None:
    hub.answers = {"/api/models/own/model": answer}
    with pytest.raises(SizeUnknown, match=why):
        size_of("own/model", tmp_path)


@pytest.mark.parametrize("state", ["nobody listens", "no URL", "offline"])
def test_without_a_hub_nothing_hangs(state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "nonsense" if state == "no URL" else f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if state == "offline" else "")
    with pytest.raises(SizeUnknown):
        size_of("own/model", tmp_path)


def test_hub_that_sends_without_an_end_is_left_at_the_timeout(hub: type[Hub], tmp_path: Path) -> None:
    """Each read succeeds in time, so no timeout of a read ends the request."""
    hub.drips_s = 1.0
    with pytest.raises(SizeUnknown, match="did not answer within"):
        size_of("own/model", tmp_path, timeout_s=0.1)


@pytest.mark.usefixtures("hub")
def test_folder_on_the_machines_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(SizeUnknown, match="is a folder on the machines"):
        size_of("/mnt/models/llama", tmp_path)
