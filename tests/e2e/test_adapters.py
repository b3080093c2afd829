"""A whole run that trains LoRA: its policies are adapters, and its nodes compute with them what it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.stream import manifest
from tests.e2e.harness import kill
from tests.e2e.tiny import check_healthy, finish, make_tiny, reach, tiny_run

pytestmark = [pytest.mark.whole, pytest.mark.slow]
STEPS = 8
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}


def test_a_run_of_lora_publishes_adapters_and_outlives_its_node(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny")
    run = tiny_run(tmp_path / "run", tiny, replicas=1, peft=LORA, max_steps=STEPS, save_steps=4)
    try:
        run.cli("up", str(run.yaml), "-y", "-d")
        reach(run, 3)
        kill(run.pids("rollout-0-i1"))
        finish(run)
        check_healthy(run, STEPS, gain=-1.0)  # eight steps of an adapter teach next to nothing
        keys = [entry.key for entry in run.store.entries(layout.POLICIES)]
        found = [manifest.load(run.store, key.rpartition("/")[0]) for key in keys if key.endswith(layout.MANIFEST)]
        assert {one.meta["kind"] for one in found} == {"adapter"}
        whole_bytes = (tiny / "model" / "model.safetensors").stat().st_size
        assert all(one.size_bytes < whole_bytes / 2 for one in found)
    finally:
        run.end()
