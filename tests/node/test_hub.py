"""The hub's own client, in a process of its own, against a stand-in for the hub that is slow, silent or shut."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.policies.serving.joining import HUB, Stage
from grpo_orch.tasks.machine.base_model import model_folder
from grpo_orch.tasks.models import hub
from tests.budget import HANG_S

COMMIT = "c" * 40
PATIENT = dict.fromkeys(("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"), f"{HANG_S:.0f}")  # 10 s by default
BIG_BYTES = 48 << 20  # its client writes pieces of 10 MiB


class Hub(BaseHTTPRequestHandler):
    """Stands in for the hub, as far as its client asks for a snapshot."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    token = ""
    sends: threading.Event  # half of a large file, then it waits for this

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            self._answer(401, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path == "/api/models/own/model/revision/main":
            said = {"id": "own/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}
            self._answer(200, json.dumps(said).encode())
        elif path == f"/api/models/own/model/tree/{COMMIT}":
            self._answer(200, json.dumps([self._entry(name) for name in self.files]).encode())
        elif (name := path.rpartition("/resolve/")[2].partition("/")[2]) in self.files:
            content, asked = self.files[name], self.headers.get("Range")
            first, _, last = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last) + 1 if last else None]
            told = {"X-Repo-Commit": COMMIT, "ETag": f'"{_digest(content)}"'}
            self._answer(200 if asked is None else 206, part, told)
        else:
            self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def _entry(self, name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(self.files[name]), "oid": _digest(self.files[name])}

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        half = len(body) // 2
        self.wfile.write(body[:half])
        self.wfile.flush()
        if len(body) == BIG_BYTES:
            self.sends.wait(HANG_S)
        with contextlib.suppress(BrokenPipeError):  # who asked was ended
            self.wfile.write(body[half:])

    def log_message(self, *_: Any) -> None:
        pass


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def at_hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which the stand-in is the hub."""
    Hub.files = {
        "config.json": b"{}",
        "model.safetensors": os.urandom(BIG_BYTES),
        "original/model.safetensors": b"twice",
        "modeling_own.py": b"raise SystemExit",
    }
    Hub.token, Hub.sends = "", threading.Event()
    Hub.sends.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    away = ("HF_TOKEN", "HF_HUB_OFFLINE", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    env = {name: value for name, value in os.environ.items() if name not in away}
    env |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hf")}
    env |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **PATIENT}
    yield env
    Hub.sends.set()
    server.shutdown()
    server.server_close()


def test_model_download_reports_progress_and_skips_extras(at_hub: dict[str, str]) -> None:
    said = list[Stage]()

    def say(stage: Stage) -> None:
        said.append(stage)
        if stage.done_bytes * 3 > stage.total_bytes > 0:  # half of it has come
            Hub.sends.set()

    Hub.sends.clear()
    folder = hub.fetch("own/model", None, None, at_hub, say, HANG_S)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == Hub.files["model.safetensors"]
    assert {(one.name, one.total_bytes) for one in said if one.total_bytes} == {(HUB, BIG_BYTES + 2)}
    assert hub.fetch("own/model", None, None, at_hub, lambda _: None, HANG_S) == folder


def test_a_download_that_does_not_get_on_is_ended(at_hub: dict[str, str]) -> None:
    Hub.sends.clear()
    with pytest.raises(hub.DownloadFailed, match="no further for 0 s"):
        hub.fetch("own/model", None, None, at_hub, lambda _: None, 0.0)


def test_interrupt_of_a_download_ends_the_process(at_hub: dict[str, str]) -> None:
    def say(_: Stage) -> None:
        raise InterruptedError

    Hub.sends.clear()
    with pytest.raises(InterruptedError):
        hub.fetch("own/model", None, None, at_hub, say, HANG_S)


def test_a_gated_model_needs_the_token(at_hub: dict[str, str]) -> None:
    Hub.token = "secret"
    with pytest.raises(hub.DownloadFailed) as refused:
        hub.fetch("own/model", None, None, at_hub, lambda _: None, HANG_S)
    assert "401" in str(refused.value)
    assert "\n" not in str(refused.value)
    found = hub.fetch("own/model", None, None, at_hub | {"HF_TOKEN": "secret"}, lambda _: None, HANG_S)
    assert (found / "config.json").exists()


def test_fetched_model_counts_as_whole_if_hub_has_more(at_hub: dict[str, str], tmp_path: Path) -> None:
    """The hub's client remembers which files there are, and takes a snapshot without some for cut off."""
    folder = hub.fetch("own/model", None, str(tmp_path / "cache"), at_hub, lambda _: None, HANG_S)
    assert model_folder("own/model", cache_dir=str(tmp_path / "cache")) == folder


@pytest.mark.parametrize("call", ["hub_tensors", "model_config", "model_folder"])
def test_unreachable_hub_is_no_error_for_a_look(call: str, at_hub: dict[str, str]) -> None:
    """Each in a process: what the hub's client raises there is another library's in each of its versions."""
    nowhere = at_hub | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    asked = f"from grpo_orch.tasks.machine.base_model import {call}; print({call}('own/model'))"
    said = subprocess.run([sys.executable, "-c", asked], env=nowhere, capture_output=True, check=True).stdout
    assert said.split() in ([b"{}"], [b"None"])


def weights_file(names: list[str]) -> bytes:
    tensors = {
        name: {"dtype": "BF16", "shape": [2, 1], "data_offsets": [4 * at, 4 * at + 4]}
        for at, name in enumerate(names)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4 * len(names))


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
def test_tensors_of_a_model_are_read_from_hub_without_weights(
    files: dict[str, bytes], found: list[str], at_hub: dict[str, str]
) -> None:
    Hub.files = files
    asked = (
        "import json; from grpo_orch.tasks.machine.base_model import hub_tensors; "
        "print(json.dumps({name: [one.dtype, one.shape] for name, one in hub_tensors('own/model').items()}))"
    )
    said = subprocess.run([sys.executable, "-c", asked], env=at_hub, check=True, capture_output=True).stdout
    assert json.loads(said.splitlines()[-1]) == {name: ["BF16", [2, 1]] for name in found}
