"""How a trainer's processes are started on its machine, and with what they ended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.security.redaction import NAMES_ENV
from grpo_orch.checkpoint.security.vouched import sign_run
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.gpus import DRIVER_HINT, DriverFailed
from grpo_orch.policies.model.spec import Dataset, RunSpec, TrainerSpec
from grpo_orch.policies.model.vocabulary import Role
from grpo_orch.tasks.machine.exit_note import (
    REASON,
    REASON_CHARS_MAX,
    leave_exit_code,
    take_exit_code,
    take_reason,
    trainer_exit_code,
)
from grpo_orch.tasks.machine.launching import (
    counted_gpus,
    trainer_argv,
    unfit_gpus,
    visible_gpus,
    with_own_builds,
    without_ranks,
)
from grpo_orch.tasks.machine.node_env import NodeEnv
from tests.budget import HANG_S
from tests.rigs.locales import ASCII_LOCALE


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
            spec_of(
                "H100:2", accelerate={"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": True}}
            ),
            {
                "distributed_type": "FSDP",
                "num_processes": 2,
                "main_process_port": 0,
                "fsdp_config": {
                    "fsdp_version": 2,
                    "fsdp_state_dict_type": "FULL_STATE_DICT",
                    "fsdp_offload_params": True,
                },
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
    assert argv[-2:] == ["-m", "grpo_orch.tasks.trainer.main"]
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
    driver.write_text(BROKEN)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == 1
    with pytest.raises(DriverFailed, match=SAID):
        visible_gpus({})
    driver.write_bytes(b"\x7fELF of another machine")
    with pytest.raises(DriverFailed, match="nvidia-smi cannot be run: Exec format error"):
        visible_gpus({})


# As NVIDIA's own tool does where no kernel module is loaded.
BROKEN = '#!/bin/sh\necho "NVIDIA-SMI has failed because it couldn\'t\ncommunicate with the driver."\nexit 9\n'
SAID = "nvidia-smi ends with exit code 9: NVIDIA-SMI has failed because it couldn't communicate with the driver."


@pytest.mark.parametrize(
    ("accelerators", "grpo", "role", "asked"),
    [
        ("H100:8", {}, Role.TRAINER, True),
        ("H100:8", {"use_cpu": True}, Role.TRAINER, False),
        ("", {}, Role.TRAINER, False),
        ("", {}, Role.ROLLOUT, False),
        ("H100", {"use_cpu": True}, Role.ROLLOUT, True),
    ],
)
def test_failing_driver_is_no_machine_without_gpus(
    accelerators: str, grpo: dict[str, Any], role: Role, asked: bool, broken_driver: str
) -> None:
    spec = spec_of(accelerators, **grpo)
    spec = replace(spec, rollout=replace(spec.rollout, resources=spec.trainer.resources))
    if not asked:
        assert counted_gpus(role, spec, {}) is None
        return
    with pytest.raises(DriverFailed, match=broken_driver):
        counted_gpus(role, spec, {})


@pytest.fixture
def broken_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What it says."""
    (tmp_path / "nvidia-smi").write_text(BROKEN)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return SAID


def ended(spec: RunSpec, folder: Path, node: str, module: str) -> subprocess.CompletedProcess[str]:
    """A machine's process that has ended by itself."""
    store = Store(f"file://{folder}/store")
    documents.create_run(store, RunRecord(documents.SCHEMA, "test", 0.0, replace(spec, storage=store.url)))
    sign_run(store, "token")
    told = {"RUN": store.url, "NODE": node, "TOKEN": "token", "ATTEMPT": "1", "WORKDIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", module],
        env={**os.environ, **{f"GRPO_ORCH_{name}": value for name, value in told.items()}},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_unfit_rollout_machine_reports_that_it_is_the_machine(tmp_path: Path) -> None:
    spec = spec_of()
    spec = replace(spec, rollout=replace(spec.rollout, setup="false"))
    done = ended(spec, tmp_path, "rollout-0-i1", "grpo_orch.tasks.rollout.agent")
    assert done.returncode == exit_codes.UNFIT_MACHINE, done.stderr


def test_machine_with_failing_driver_ends_in_one_line(tmp_path: Path, broken_driver: str) -> None:
    done = ended(spec_of("H100:8"), tmp_path, "trainer-0-i1", "grpo_orch.tasks.machine.trainer_machine")
    assert done.returncode == exit_codes.UNFIT_MACHINE
    assert done.stderr.splitlines() == [f"grpo-orch trainer machine: {broken_driver}; {DRIVER_HINT}"]


@pytest.mark.parametrize(
    ("spec", "gpus", "code", "says"),
    [
        (spec_of("H100:8"), 8, None, ""),
        (spec_of("H100:8"), None, None, ""),
        (spec_of(), 0, None, ""),
        (spec_of("H100:8", use_cpu=True), 0, None, ""),
        (spec_of("H100:8", accelerate={"num_processes": 7}), 8, None, ""),
        (
            spec_of("H100:8"),
            7,
            exit_codes.UNFIT_MACHINE,
            "training needs 8 GPUs, one per process, but this machine has 7",
        ),
        (spec_of(), 8, exit_codes.BAD_SPEC, "set trainer.accelerate.num_processes: 8, or CUDA_VISIBLE_DEVICES"),
    ],
)
def test_gpus_that_do_not_fit(spec: RunSpec, gpus: int | None, code: int | None, says: str) -> None:
    found = unfit_gpus(spec, gpus)
    assert (None if found is None else found[0]) == code
    assert found is None or says in found[1]


def test_lock_of_a_killed_build_blocks_no_process(tmp_path: Path) -> None:
    first = with_own_builds({"PATH": "p"}, tmp_path)
    lock = Path(first["TORCH_EXTENSIONS_DIR"]) / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    (lock.parent / "cpu_adam.so").touch()
    assert with_own_builds({"PATH": "p"}, tmp_path) == first
    assert [one.name for one in lock.parent.iterdir()] == ["cpu_adam.so"]
    assert with_own_builds({"TORCH_EXTENSIONS_DIR": "theirs"}, tmp_path) == {"TORCH_EXTENSIONS_DIR": "theirs"}


def test_ranks_of_a_job_around_the_run_are_dropped() -> None:
    job = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_PORT": "1", "OMPI_COMM_WORLD_RANK": "3", "PMI_SIZE": "8"}
    assert without_ranks({**job, "PATH": "p"}) == {"PATH": "p"}


# With what a trainer ended, by its process and by its own word.


@pytest.mark.parametrize(
    ("ended", "noted", "told"),
    [
        (0, 0, exit_codes.OK),
        (0, None, exit_codes.FAILED),  # somebody's os._exit(0): the run has steps left
        (1, exit_codes.DIVERGED, exit_codes.DIVERGED),  # accelerate's launcher
        (1, None, exit_codes.FAILED),
        (137, None, 137),
    ],
)
def test_trainer_is_done_only_by_its_own_note(tmp_path: Path, ended: int, noted: int | None, told: int) -> None:
    if noted is not None:
        leave_exit_code(tmp_path, noted)
    assert trainer_exit_code(tmp_path, ended) == told
    assert take_exit_code(tmp_path) is None, "it is of this attempt alone"


def test_invalid_utf8_in_reason_keeps_the_exit_code(tmp_path: Path) -> None:
    """A path may hold any bytes, and the error that names it then holds lone surrogates."""
    leave_exit_code(tmp_path, exit_codes.BAD_SPEC, "no such file: /data/\udcff")
    assert (take_exit_code(tmp_path), take_reason(tmp_path)) == (
        exit_codes.BAD_SPEC,
        "no such file: /data/\\udcff",
    )


@pytest.mark.parametrize("told_to_end", [exit_codes.OK, exit_codes.STOPPED])
def test_terminated_process_keeps_the_others_reason(tmp_path: Path, told_to_end: int) -> None:
    """As a launcher tells all once one has failed."""
    leave_exit_code(tmp_path, exit_codes.BAD_SPEC, "no such column")
    leave_exit_code(tmp_path, told_to_end, "told to end")
    assert (take_exit_code(tmp_path), take_reason(tmp_path)) == (exit_codes.BAD_SPEC, "no such column")


def test_reason_is_one_bounded_line_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMES_ENV, "HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijkl")
    leave_exit_code(tmp_path, exit_codes.BAD_SPEC, "401 for\nhf_abcdefghijkl " + "x" * 2 * REASON_CHARS_MAX)
    reason = take_reason(tmp_path)
    assert reason.startswith("401 for [secret] xxx")
    assert len(reason) == REASON_CHARS_MAX + len("...")
    assert take_reason(tmp_path) == "", "it is of this attempt alone"


def test_reason_is_whole_in_an_ascii_locale(tmp_path: Path) -> None:
    """It may quote the user's rows and file names."""
    code = rf"""
from pathlib import Path
from grpo_orch.tasks.machine.exit_note import leave_reason
leave_reason(Path({str(tmp_path)!r}), "no column yan\u0131t")
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **ASCII_LOCALE}, check=True)
    assert take_reason(tmp_path) == "no column yanıt"


def test_reason_that_cannot_be_written_leaves_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / REASON).mkdir()
    leave_exit_code(tmp_path, exit_codes.BAD_SPEC, "no such column")
    assert take_exit_code(tmp_path) == exit_codes.BAD_SPEC
