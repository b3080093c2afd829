"""Trainers that divide weights or the optimizer over two processes: killed, they end in the same weights.

With DeepSpeed's ZeRO and FSDP2 by our launcher, over gloo, on CPUs that pass for GPUs (`cpu_for_gpu`). At its
first start DeepSpeed compiles a module for collectives on CPUs, and one for its optimizer in the machine's memory,
for half a minute each; they stay in torch's cache.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from checkpoint.stream import exports
from checkpoint.stream.catalog import Catalog
from checkpoint.stream.transfer import read_manifest
from policies.model import exit_codes
from policies.model.vocabulary import PolicyVersion
from tests.budget import HANG_S
from tests.node.ranks import cpu_for_gpu
from tests.node.ranks.test_killed import of, ranks_of, until
from tests.node.trainer.rig import Rig, make_tiny, open_rig
from tests.node.trainer.test_resume import results

STEPS = 4
LAST = PolicyVersion(0, STEPS)
BUILD_S = HANG_S  # for a compiler beside a busy machine's other work
LORA = {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj", "up_proj"]}
WRAPPED = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
OFFLOADED = {"offload_optimizer_device": "cpu"}
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "zero2-offloaded-lora": ("deepspeed_config", {"zero_stage": 2, **OFFLOADED}, True),
    "zero2": ("deepspeed_config", {"zero_stage": 2}, False),
    "zero3-offloaded": (
        "deepspeed_config",
        {"zero_stage": 3, **OFFLOADED, "offload_param_device": "cpu"},
        False,
    ),
    "zero3-lora": ("deepspeed_config", {"zero_stage": 3}, True),
    "fsdp2": ("fsdp_config", WRAPPED, False),
    "fsdp2-lora": ("fsdp_config", WRAPPED, True),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("name", CASES)
def test_what_is_divided_survives_a_kill(name: str, tiny: Path, tmp_path: Path) -> None:
    section, settings, adapted = CASES[name]
    kind = "FSDP" if section == "fsdp_config" else "DEEPSPEED"
    # Not `use_cpu`, which accelerate takes for a wish to divide nothing.
    spec = {
        **of(2, use_cpu=False, max_steps=STEPS),
        "accelerate": {"distributed_type": kind, section: settings},
        "peft": LORA if adapted else None,
    }
    with open_rig(tmp_path / "calm", tiny, **spec) as calm:
        assert calm.wait(start(calm, 1), timeout_s=BUILD_S + HANG_S) == exit_codes.OK
        weights = final_weights(calm)
        load_export(calm, tiny, tmp_path / "export", adapted=adapted)
    with open_rig(tmp_path / "killed", tiny, **spec) as killed:
        launcher = start(killed, 1)
        until(killed, lambda: (beat := killed.beat()) is not None and beat.step >= 3)
        random.choice(ranks_of(launcher)).kill()
        assert launcher.wait(HANG_S) != 0
        assert killed.stored()[-1] == PolicyVersion(0, 2)
        assert killed.wait(start(killed, 2), 2, timeout_s=HANG_S) == exit_codes.OK
        assert final_weights(killed) == weights
    assert killed.gateway.unproved == calm.gateway.unproved == []
    assert results(killed.store) == results(calm.store)
    assert len({loss for *_, loss in results(calm.store)}) == STEPS, "nothing was learned, so this proves nothing"


def start(rig: Rig, attempt: int) -> Any:
    return rig.start_ranks(attempt, module=cpu_for_gpu.__name__)


def final_weights(rig: Rig) -> dict[str, str]:
    """Digests of the last checkpoint's weights as anybody loads them."""
    found = read_manifest(rig.store, Catalog(rig.store, "test").newest().find(LAST))
    digests = {file.name: file.digest for file in found.files if file.name.endswith("model.safetensors")}
    return {name: digest for name, digest in digests.items() if "/" not in name}


def load_export(rig: Rig, tiny: Path, folder: Path, *, adapted: bool) -> None:
    """Load what `export` makes of the last checkpoint as a stranger does."""
    prefix = exports.export_weights(rig.store, LAST).prefix
    for entry in rig.store.entries(prefix):
        path = folder / entry.key.removeprefix(f"{prefix}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rig.store.get(entry.key))
    assert not [path.name for path in folder.iterdir() if path.suffix in {".pt", ".bin", ".py"}]
    base = AutoModelForCausalLM.from_pretrained(tiny / "model" if adapted else folder)
    before = AutoModelForCausalLM.from_pretrained(tiny / "model")
    model = PeftModel.from_pretrained(base, folder).merge_and_unload() if adapted else base
    changes = [
        (one - other).abs().max()
        for one, other in zip(model.parameters(), before.parameters(), strict=True)
        if one.shape == other.shape
    ]
    assert len(changes) == len(list(before.parameters()))
    assert 0 < torch.stack(changes).max() < 1, "trained, and not to nonsense"
