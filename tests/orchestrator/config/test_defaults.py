"""What a sound run.yaml becomes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from grpo_orch.orchestrator.cli.prepare import init_text
from grpo_orch.orchestrator.config.load import ConfigError, Storage, load_spec, load_storage
from grpo_orch.orchestrator.config.load import load as load_config
from grpo_orch.policies.model.spec import (
    RunSpec,
)
from tests.generators.config_world import VALID, changed, furnish, schema_problems


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    furnish(tmp_path)
    return tmp_path


def load(folder: Path, text: str = VALID) -> RunSpec:
    (folder / "run.yaml").write_text(text)
    spec = load_spec(folder / "run.yaml")
    assert schema_problems(folder / "run.yaml") == []
    return spec


def test_the_store_s_options_are_texts_and_no_part_of_the_spec(folder: Path) -> None:
    options = "{secret_access_key: hunter2, account: 0123, timeout: 1e1, allow_http: True, name: 'true'}"
    spec = load(folder, changed(("storage: ./run", f"storage: {{url: s3://bucket/a, options: {options}}}")))
    assert spec.storage == "s3://bucket/a"
    assert b"hunter2" not in msgspec.json.encode(spec)
    storage = load_storage(folder / "run.yaml")
    assert storage == Storage(
        "s3://bucket/a",
        {
            "secret_access_key": "hunter2",
            "account": "0123",
            "timeout": "1e1",
            "allow_http": "true",
            "name": "true",
        },
    )
    assert "hunter2" not in repr(storage)


def test_the_template_is_valid(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(init_text("my-own"))
    loaded = load_config(tmp_path / "run.yaml")
    assert (loaded.spec.name, loaded.notices) == ("my-own", ())


def test_template_is_valid_with_all_comments_enabled(tmp_path: Path) -> None:
    lines = []
    for line in init_text("all").splitlines():
        bare = line.strip()
        if bare.startswith("# ") and bare[2:].lstrip("- {").split(":")[0].isidentifier() and ":" in bare:
            line = line.replace("# ", "", 1)
        lines.append(line)
    text = "\n".join(lines).replace("save_steps: 50", "save_steps: 50\n  eval_steps: 50", 1)
    (tmp_path / "run.yaml").write_text(text)
    spec = load_spec(tmp_path / "run.yaml")
    assert spec.rehearse is not None
    assert len(spec.rehearse.faults) == 4
    assert spec.trainer.peft is not None
    assert spec.trainer.setup
    assert spec.grpo["bf16"] is False


def test_the_store_is_found_however_the_rest_of_the_file_is(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: 7\nstorage: ./run\ntrainer: {model: ./moved-away}\nnonsense: true\n")
    assert load_storage(path) == Storage(f"file://{tmp_path}/run", {})
    for text in ("name: x\n", "storage:\n", "storage: [1]\n", "storage: s3://\n", "storage: {url: [1]}\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="storage"):
            load_storage(path)
