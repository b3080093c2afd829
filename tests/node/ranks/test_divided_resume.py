"""What DeepSpeed and FSDP2 divide over two processes goes on from a checkpoint with the same weights, bit for bit.

By our launcher, over gloo, on CPUs that pass for GPUs, with transformers' trainer: what TRL's does beside it, each
window's rest and seeds, `test_killed` holds, with ZeRO-3's whole weights among others. DeepSpeed compiles its
module for an optimizer in the machine's memory at its first start, a minute of two processors; torch caches it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.spec import Dataset, RunSpec, TrainerSpec
from grpo_orch.tasks.machine.launching import trainer_argv
from grpo_orch.tasks.machine.node_env import NodeEnv
from tests.budget import HANG_S
from tests.node.ranks import divided_trainer
from tests.node.ranks.divided_trainer import SAVE_STEPS, STEPS

BUILD_S = 4 * HANG_S  # for a compiler on a busy machine
WRAPPED = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
FSDP2 = {"distributed_type": "FSDP", "fsdp_config": WRAPPED}
ZERO3 = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}
OFFLOADED = {"zero_stage": 2, "offload_optimizer_device": "cpu"}
ZERO2 = {"distributed_type": "DEEPSPEED", "deepspeed_config": OFFLOADED}


@pytest.mark.parametrize(
    ("accelerate", "adapted"),
    [
        pytest.param(FSDP2, False, id="fsdp2"),
        pytest.param(FSDP2, True, id="fsdp2-lora"),
        pytest.param(ZERO3, True, id="zero3-lora"),
        pytest.param(ZERO2, True, id="zero2-offloaded-lora"),
    ],
)
def test_resumed_trainer_has_the_same_weights(accelerate: dict[str, Any], adapted: bool, tmp_path: Path) -> None:
    if accelerate["distributed_type"] == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    calm, again = tmp_path / "calm", tmp_path / "again"
    launch(accelerate, calm, adapted, "")
    launch(accelerate, again, adapted, str(calm / f"checkpoint-{SAVE_STEPS}"))
    once, twice = (folder / f"checkpoint-{STEPS}" for folder in (calm, again))
    name = "adapter_model.safetensors" if adapted else "model.safetensors"
    assert digest(once / name) == digest(twice / name)
    assert digest(once / name) != digest(calm / f"checkpoint-{SAVE_STEPS}" / name), "nothing was learned"
    load(once, adapted)


def launch(accelerate: dict[str, Any], folder: Path, adapted: bool, checkpoint: str) -> None:
    trainer = TrainerSpec(
        model="m",
        dataset=Dataset(path="d"),
        reward_funcs=("r.f",),
        resources={"accelerators": "H100:2"},
        accelerate=accelerate,
    )
    spec = RunSpec(name="t", storage="memory://t", trainer=trainer, grpo={})
    folder.mkdir()
    env = NodeEnv("memory://t", "trainer-0-i1", "", 1, 0, str(folder), "127.0.0.1")
    *launcher, _ = trainer_argv(env, spec)
    argv = [*launcher, divided_trainer.__name__, str(folder), str(adapted), checkpoint]
    # As on a machine that we have set up: the compiler's driver lies beside Python.
    told = {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(argv, env={**os.environ, **told}, capture_output=True, timeout=BUILD_S, check=False)
    assert done.returncode == exit_codes.OK, (done.stdout + done.stderr).decode()[-4000:]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load(checkpoint: Path, adapted: bool) -> None:
    """As a stranger does. Raises, or misses weights, where it does not hold the whole."""
    if adapted:
        from transformers import LlamaConfig, LlamaForCausalLM

        base = LlamaForCausalLM(LlamaConfig(**divided_trainer.SIZES, num_attention_heads=2, num_key_value_heads=2))
        assert PeftModel.from_pretrained(base, checkpoint).merge_and_unload() is not None
        return
    _, told = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["mismatched_keys"]
