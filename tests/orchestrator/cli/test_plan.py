"""`grpo-orch plan` from run.yaml to its JSON, with SkyPilot's own catalog and without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from grpo_orch.orchestrator.cli.prepare import write_recipe
from tests.budget import HANG_S
from tests.generators.model_configs import put_in_cache
from tests.rigs.sky.home import make_outside


@pytest.mark.skipif(find_spec("sky") is None, reason="SkyPilot is not installed: pip install 'grpo-orch[sky]'")
def test_plan_has_catalog_prices_and_names_missing_data(tmp_path: Path) -> None:
    home = tmp_path / "home"
    make_outside(home, "http://127.0.0.1:1")
    put_in_cache(tmp_path / "hub")
    write_recipe("gsm8k-zero2", tmp_path / "run", name=None)
    run_yaml = tmp_path / "run" / "run.yaml"
    run_yaml.write_text(run_yaml.read_text().replace('"L4:1"', '"A10G:1", infra: aws'))
    here = {"HOME": str(home), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "grpo_orch", "plan", str(run_yaml), "-o", "json"],
        env={**os.environ, **here},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("\n") == 1, ended.stdout
    told = json.loads(ended.stdout)
    ways = {way["name"]: way["cost"]["usd_per_h"] for way in told["money"]}
    assert ways == pytest.approx({"all on demand": 2.012, "rollout on spot": 1.426, "all on spot": 0.84})
    (priced,) = [kind for kind in told["kinds"] if kind["trainer_prices"]]
    assert (priced["gpu"], priced["rollout_prices"][0]["spot_usd_per_h"]) == ("A10G", 0.42)
    assert any(note.startswith("prices: SkyPilot's catalog as of aws 20") for note in told["notes"])
