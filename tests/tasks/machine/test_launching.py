"""How a trainer's processes are started on its machine."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from policies.model import exit_codes
from policies.model.spec import Dataset, RunSpec, TrainerSpec
from tasks.machine.node_env import NodeEnv
from tasks.machine.processes.launching import trainer_argv, unfit_gpus, visible_gpus, with_own_builds


def spec_of(accelerators: str = "", *, accelerate: dict[str, Any] | None = None, **grpo: Any) -> RunSpec:
    trainer = TrainerSpec(
        model="m",
        dataset=Dataset(path="d"),
        reward_funcs=("x.y",),
        resources={"accelerators": accelerators} if accelerators else {},
        accelerate=accelerate,
    )
    return RunSpec(name="t", storage="memory://t", trainer=trainer, grpo=grpo, cloud="sky")


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        (spec_of(), None),
        (spec_of("H100"), None),
        (spec_of("H100:8"), {"distributed_type": "MULTI_GPU", "num_processes": 8, "main_process_port": 0}),
        (
            spec_of("H100:8", accelerate={"distributed_type": "DEEPSPEED", "main_process_port": 7}),
            {"distributed_type": "DEEPSPEED", "num_processes": 8, "main_process_port": 7},
        ),
        (
            spec_of("H100:2", accelerate={"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}),
            {
                "distributed_type": "DEEPSPEED",
                "num_processes": 2,
                "main_process_port": 0,
                "deepspeed_config": {"zero_stage": 3, "zero3_save_16bit_model": True},
            },
        ),
        (
            spec_of("H100:2", accelerate={"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}),
            {
                "distributed_type": "FSDP",
                "num_processes": 2,
                "main_process_port": 0,
                "fsdp_config": {"fsdp_version": 2, "fsdp_state_dict_type": "FULL_STATE_DICT"},
            },
        ),
        (
            spec_of(accelerate={"use_cpu": True}),
            {"distributed_type": "NO", "num_processes": 1, "main_process_port": 0, "use_cpu": True},
        ),
    ],
)
def test_one_process_a_gpu(spec: RunSpec, config: dict[str, Any] | None, tmp_path: Path) -> None:
    argv = trainer_argv(NodeEnv("memory://t", "n", "", 1, 0, str(tmp_path), "127.0.0.1"), spec)
    assert argv[0] == sys.executable
    assert argv[-2:] == ["-m", "tasks.trainer.main"]
    path = tmp_path / "accelerate.json"
    assert (json.loads(path.read_bytes()) if path.exists() else None) == config
    assert ("accelerate.commands.launch" in argv) == (config is not None)


def test_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,-1,1"}) == visible_gpus({"CUDA_VISIBLE_DEVICES": "0,0"}) == 1
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert visible_gpus({}) is None
    monkeypatch.undo()
    driver = tmp_path / "nvidia-smi"  # a stand-in for the driver's program, which needs a GPU
    driver.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: a)'; echo 'GPU 1: NVIDIA H100 (UUID: b)'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert visible_gpus({}) == 2
    driver.write_text("#!/bin/sh\nexit 9\n")
    assert visible_gpus({}) is None


@pytest.mark.parametrize(
    ("spec", "gpus", "code", "says"),
    [
        (spec_of("H100:8"), 8, None, ""),
        (spec_of("H100:8"), None, None, ""),
        (spec_of(), 0, None, ""),
        (spec_of("H100:8", use_cpu=True), 0, None, ""),
        (spec_of("H100:8", accelerate={"num_processes": 7}), 8, None, ""),
        (spec_of("H100:8"), 7, exit_codes.FAILED, "8 processes are to train, and this machine shows 7 GPUs"),
        (spec_of(), 8, exit_codes.BAD_SPEC, "set trainer.accelerate.num_processes: 8, or CUDA_VISIBLE_DEVICES"),
    ],
)
def test_gpus_that_do_not_fit(spec: RunSpec, gpus: int | None, code: int | None, says: str) -> None:
    found = unfit_gpus(spec, gpus)
    assert (None if found is None else found[0]) == code
    assert found is None or says in found[1]


def test_a_lock_that_a_killed_build_has_left_is_waited_for_by_nobody(tmp_path: Path) -> None:
    first = with_own_builds({"PATH": "p"}, tmp_path)
    lock = Path(first["TORCH_EXTENSIONS_DIR"]) / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    (lock.parent / "cpu_adam.so").touch()
    assert with_own_builds({"PATH": "p"}, tmp_path) == first
    assert [one.name for one in lock.parent.iterdir()] == ["cpu_adam.so"]
    assert with_own_builds({"TORCH_EXTENSIONS_DIR": "theirs"}, tmp_path) == {"TORCH_EXTENSIONS_DIR": "theirs"}
