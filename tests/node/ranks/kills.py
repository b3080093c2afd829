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

import psutil

from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.node_contract import TRAINER
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.machine.exit_note import take_exit_code
from tests.node.ranks import cpu_for_gpu
from tests.node.trainer.rig import GRPO, LORA, Process, open_rig

STEPS = 6
LAST = PolicyVersion(0, STEPS)
FSDP2 = {
    "distributed_type": "FSDP",
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}
ZERO2 = {
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"},
}
ZERO3 = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}
WAYS: dict[str, dict[str, Any]] = {
    f"{name}{'-lora' * bool(peft)}": {"accelerate": accelerate, "peft": peft}
    for name, accelerate in {"ddp": None, "zero2-offloaded": ZERO2, "zero3": ZERO3, "fsdp2": FSDP2}.items()
    for peft in (None, LORA)
}
A_STEP = GRPO["per_device_train_batch_size"]  # completions, of all processes
RANDOM = ("rng_state_0.pth", "rng_state_1.pth")


def of(processes: int, windows: int = 1, **grpo: Any) -> dict[str, Any]:
    """A run of eight completions a step, in as many processes as its machine is to have GPUs."""
    batch = {
        "max_steps": STEPS,
        "per_device_train_batch_size": GRPO["per_device_train_batch_size"] // processes // windows,
        "gradient_accumulation_steps": windows,
        "steps_per_generation": 1,
    }
    return {"grpo": {**batch, **grpo}, "accelerators": f"H100:{processes}"}


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


def kill_one(
    way: str, folder: Path, tiny: Path, seed: int, limit_s: float, max_staleness: int = 0, windows: int = 1
) -> Killed:
    """Train twice, once with a rank killed at a random completion of a random step, and compare.

    A step has so many windows.
    """
    dice = random.Random(f"{way} {seed}")
    # What divides nothing works on CPUs as it is.
    module, on_cpu = (TRAINER, True) if WAYS[way]["accelerate"] is None else (cpu_for_gpu.__name__, False)
    run = {**of(2, windows, use_cpu=on_cpu), **WAYS[way], "max_staleness": max_staleness}
    begun_s = time.monotonic()
    with open_rig(folder / "calm", tiny, **run) as calm:
        assert calm.wait(calm.start_ranks(module=module), timeout_s=limit_s) == exit_codes.OK
        whole = calm.digests(*RANDOM)
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
        assert take_exit_code(killed.work) in (None, exit_codes.FAILED), "the other rank lost its connection"
        restored = max(at.step for at in killed.stored())
        again = killed.start_ranks(2, module)
        assert killed.wait(again, 2, timeout_s=limit_s) == exit_codes.OK
        assert killed.log(2).read_text().count("checkpoint_restored") == 1
        assert killed.gateway.unproved == calm.gateway.unproved == []
        same = killed.digests(*RANDOM) == whole, killed.results() == calm.results()
    took_s = time.monotonic() - begun_s
    return Killed(way, seed, last // A_STEP, rank, restored, *same, round(calm_s, 1), round(took_s, 1))


def ranks_of(launcher: Process) -> list[psutil.Process]:
    """The trainer's processes that a launcher has started."""
    children = psutil.Process(launcher.pid).children()
    return [one for one in children if {TRAINER, cpu_for_gpu.__name__} & set(one.cmdline())]
