"""TRL's own training in two processes, undisturbed and with one of them killed in the middle: the same weights.

By our launcher, over gloo, on CPUs that pass for GPUs (`cpu_for_gpu`), for each way to divide what is trained.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.stream.catalog import Catalog
from checkpoint.stream.transfer import read_manifest
from policies.model import exit_codes
from policies.model.node_contract import TRAINER
from tests.node.ranks import cpu_for_gpu
from tests.node.ranks.test_killed import LAST, STEPS, of, ranks_of
from tests.node.trainer.rig import GRPO, Rig, open_rig
from tests.node.trainer.test_resume import results

FSDP2 = {
    "distributed_type": "FSDP",
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}
ZERO2 = {
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"},
}
ZERO3 = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]}
WAYS: dict[str, dict[str, Any]] = {
    f"{name}{'-lora' * bool(peft)}": {"accelerate": accelerate, "peft": peft}
    for name, accelerate in {"ddp": None, "zero2-offloaded": ZERO2, "zero3": ZERO3, "fsdp2": FSDP2}.items()
    for peft in (None, LORA)
}
A_STEP = GRPO["per_device_train_batch_size"]  # completions, of all processes
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class Killed:
    """What became of one run with a process killed, beside an undisturbed one."""

    way: str
    seed: int
    step: int  # the one before that in whose middle it was killed
    rank: int
    restored: int  # the step that the restarted trainer began with
    same_weights: bool
    same_metrics: bool
    calm_s: float
    killed_s: float


def kill_one(way: str, folder: Path, tiny: Path, seed: int, limit_s: float, max_staleness: int = 0) -> Killed:
    """Train twice, once with a rank killed at a random completion of a random step, and compare."""
    dice = random.Random(f"{way} {seed}")
    # What divides nothing works on CPUs as it is.
    module, on_cpu = (TRAINER, True) if WAYS[way]["accelerate"] is None else (cpu_for_gpu.__name__, False)
    run = {**of(2, use_cpu=on_cpu), **WAYS[way], "max_staleness": max_staleness}
    begun_s = time.monotonic()
    with open_rig(folder / "calm", tiny, **run) as calm:
        assert calm.wait(calm.start_ranks(module=module), timeout_s=limit_s) == exit_codes.OK
        whole = weights_of(calm)
    calm_s, begun_s = time.monotonic() - begun_s, time.monotonic()
    with open_rig(folder / "killed", tiny, **run) as killed:
        first = (2 + max_staleness) * A_STEP  # a checkpoint is made by then
        last, rank = dice.randrange(first, (STEPS - 1) * A_STEP), dice.randrange(2)
        reached, killed_one = threading.Event(), threading.Event()

        def hold(made: int) -> None:  # it cannot end before it is killed
            if made > last:
                reached.set()
                killed_one.wait(limit_s)

        killed.gateway.on_completion = hold
        killed.gateway.on_asked = lambda _: hold(killed.gateway.made)  # who hears nothing asks again
        launcher = killed.start_ranks(module=module)
        assert reached.wait(limit_s), killed.log().read_text()[-4000:]
        # Beside training: a step may be ahead of its checkpoint.
        killed.until("stored", lambda: bool(killed.stored()))
        ranks_of(launcher)[rank].kill()
        killed_one.set()
        assert launcher.wait(limit_s) != 0, "it has ended before"
        restored = max(at.step for at in killed.stored())
        again = killed.start_ranks(2, module)
        assert killed.wait(again, 2, timeout_s=limit_s) == exit_codes.OK
        same = weights_of(killed) == whole, results(killed.store) == results(calm.store)
    took_s = time.monotonic() - begun_s
    return Killed(way, seed, last // A_STEP, rank, restored, *same, round(calm_s, 1), round(took_s, 1))


def weights_of(rig: Rig) -> dict[str, str]:
    """Digests of what the last checkpoint has of weights."""
    found = read_manifest(rig.store, Catalog(rig.store, "test").newest().find(LAST)).files
    digests = {file.name: file.digest for file in found if file.name in WEIGHTS}
    assert digests
    return digests
