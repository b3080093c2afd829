"""What of joining needs the node's libraries: a worker's own account of its weights, and the hub's headers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tasks.rollout.vllm.server import PolicyRefused
from tasks.rollout.vllm.worker import Extension
from tasks.trl.canary import canary_of
from tests.node.rollout.test_canary import Node, dense_model, policy, without_a_layer
from tests.node.test_hub import PATIENT


def test_a_worker_tells_which_parameters_have_had_no_weights() -> None:
    loaded: list[str] = []

    def load_weights(weights: list[str]) -> set[str]:
        loaded.extend(weights)
        return set(weights)

    model = SimpleNamespace(
        named_parameters=lambda: [(name, None) for name in ("a", "b", "head")], load_weights=load_weights
    )
    worker: Any = SimpleNamespace(
        get_model=lambda: model, vllm_config=SimpleNamespace(load_config=SimpleNamespace(load_format="dummy"))
    )
    worker_class = cast("Any", Extension)
    worker_class.await_weights(worker)
    assert worker.vllm_config.load_config.load_format == "auto"
    assert worker_class.not_loaded(worker) == sorted(["a", "b", "head"])
    model.load_weights(["a", "b"])
    assert worker_class.not_loaded(worker) == ["head"]
    model.load_weights(["head"])
    assert worker_class.not_loaded(worker) == []
    assert loaded == ["a", "b", "head"]


def weights_file(names: list[str]) -> bytes:
    tensors = {
        name: {"dtype": "BF16", "shape": [2, 1], "data_offsets": [4 * at, 4 * at + 4]}
        for at, name in enumerate(names)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4 * len(names))


class Hub(BaseHTTPRequestHandler):
    """Stands in for the hub, as far as its client asks for the files of a model."""

    files: dict[str, bytes]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        content = self.files.get(self.path)
        if content is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        asked = self.headers.get("Range")
        first, _, last = (asked or f"bytes=0-{len(content) - 1}").removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1]
        self.send_response(200 if asked is None else 206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("X-Repo-Commit", "c" * 40)
        self.send_header("ETag", '"abc"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(part)

    def log_message(self, *_: Any) -> None:
        pass


SHARDS = {"one.safetensors": ["a", "b"], "two.safetensors": ["c"]}
INDEX = {"metadata": {}, "weight_map": {name: file for file, names in SHARDS.items() for name in names}}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"model.safetensors": weights_file(["a"])}, ["a"]),
        (
            {
                "model.safetensors.index.json": json.dumps(INDEX).encode(),
                **{name: weights_file(names) for name, names in SHARDS.items()},
            },
            ["a", "b", "c"],
        ),
        ({"pytorch_model.bin": b"..."}, []),
        ({"model.safetensors": b"<html>"}, []),
        ({"model.safetensors.index.json": b"{"}, []),
    ],
    ids=["whole", "shards", "another format", "no such file", "no such index"],
)
def test_a_models_tensors_are_read_from_the_hub_without_its_weights(
    files: dict[str, bytes], found: list[str], tmp_path: Path
) -> None:
    Hub.files = {f"/own/model/resolve/main/{name}": content for name, content in files.items()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    env = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
        **PATIENT,
    }
    asked = (
        "import json; from tasks.machine.base_model import hub_tensors; "
        "print(json.dumps({name: [one.dtype, one.shape] for name, one in hub_tensors('own/model').items()}))"
    )
    try:
        said = subprocess.run([sys.executable, "-c", asked], env=env, check=True, capture_output=True).stdout
    finally:
        server.shutdown()
        server.server_close()
    assert json.loads(said.splitlines()[-1]) == {name: ["BF16", [2, 1]] for name in found}


def test_an_engine_without_weights_serves_nobody_before_it_has_all_of_them(tmp_path: Path) -> None:
    """Were the files not looked at: a policy that lacks tensors leaves it without, and the next one does not."""
    (tmp_path / "base").mkdir()
    dense_model(tmp_path / "base", seed=0)
    (tmp_path / "base" / "model.safetensors").unlink()  # of the base model it reads all but the weights
    node = Node(tmp_path, "bfloat16", bare=True)
    try:
        assert node.asked("0-0") == node.asked("None") == node.asked("") == 409
        lacking = policy(tmp_path / "lacking", dense_model(tmp_path / "made", seed=1), without_a_layer)
        with pytest.raises(PolicyRefused, match=r"without weights after its first policy: model\.layers\.1\."):
            node.load("0-0", lacking, None)
        assert node.asked("0-0") == 409
        made = dense_model(tmp_path / "made", seed=2)
        node.load("0-1", policy(tmp_path / "whole", made), canary_of(made, "no"))
        assert node.asked("0-1") == 200
    finally:
        node.stop()
