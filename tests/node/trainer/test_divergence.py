"""A run that diverges is stopped by its trainer in time, and what was sealed of it reaches the store."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import TrainerCallback

from grpo_orch.checkpoint.records import metrics
from grpo_orch.checkpoint.records.documents import RunRecord, write_fork
from grpo_orch.checkpoint.store.codec import from_json
from grpo_orch.policies.detect.divergence import Detector, Health, Verdict, follow
from grpo_orch.policies.detect.symptoms import WITNESS
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.spec import CheckpointsSpec, KlPolicy
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.tick.snapshot import Trainer
from grpo_orch.tasks.machine.exit_note import take_exit_code
from grpo_orch.tasks.machine.spooling import find_spool
from grpo_orch.tasks.storing.heartbeat import Heartbeat
from grpo_orch.tasks.storing.saving import RUN_FILE, read_detector
from grpo_orch.tasks.trainer import callbacks
from grpo_orch.tasks.trainer.user_objects import is_out_of_memory
from tests.budget import HANG_S
from tests.node.trainer.rig import Rig, open_rig

STEPS = 12
# The rate begins at nothing, so that there is a calm to compare with, and explodes.
EXPLODING: dict[str, Any] = {
    "max_steps": STEPS,
    "save_steps": 1,
    "learning_rate": 0.8,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": STEPS,
}
START = PolicyVersion(0, 2)  # of the next timeline
CALM = {"learning_rate": 0.001, "beta": 0.04, "epsilon": 0.1}


@dataclass(frozen=True)
class Diverged:
    """A run whose detector tripped while its uploader stood still; and its next timeline, which ran to the end."""

    rig: Rig
    code: int
    beat: Trainer
    verdict: Verdict
    stored: list[PolicyVersion]  # before the next timeline began
    rows: dict[int, metrics.MetricsRow]
    next_code: int


@pytest.fixture(scope="module")
def diverged(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Diverged]:
    kept = CheckpointsSpec(keep_last=100, spool_gib=1.0)
    folder = tmp_path_factory.mktemp("run")
    with open_rig(folder, tiny, grpo=EXPLODING, kl=KlPolicy(limit=0.5), checkpoints=kept) as rig:
        rig.uploader.send_signal(signal.SIGSTOP)
        trainer = rig.start_trainer()
        rig.until("tripped", lambda: (beat := rig.beat()) is not None and tripped(beat))
        assert trainer.poll() is None, "it waits for what it has sealed"
        rig.uploader.send_signal(signal.SIGCONT)
        code, beat, stored = trainer.wait(HANG_S), rig.last_beat(), rig.stored()
        assert beat.verdict is not None
        rows = {row.step: row for row in metrics.read_metrics(rig.store)}
        write_fork(rig.store, Fork(1, str(START), CALM))
        rig.uploader.kill()  # it ends with its trainer
        rig.uploader.wait()
        rig.start_uploader()
        next_code = rig.wait(rig.start_trainer(2, timeline=1), 2)
        yield Diverged(rig, code, beat, beat.verdict, stored, rows, next_code)


def tripped(beat: Trainer) -> bool:
    return beat.verdict is not None and beat.verdict.health is Health.TRIPPED


def test_diverging_run_exits_with_its_code_and_one_line(diverged: Diverged) -> None:
    verdict = diverged.verdict
    assert diverged.code == exit_codes.DIVERGED
    assert (diverged.beat.activity, verdict.health) == ("diverged", Health.TRIPPED)
    assert verdict.tripped_step is not None
    assert verdict.tripped_step < STEPS, "it was stopped, not at its end"
    output = diverged.rig.log(1).read_text()
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    assert last.startswith(
        f"grpo-orch trainer: stopped at step {verdict.tripped_step}: the run diverges since step "
    )
    assert verdict.evidence[0] in last


def test_sealed_checkpoints_are_stored_and_the_tripped_step_not(diverged: Diverged) -> None:
    assert diverged.verdict.tripped_step is not None
    assert diverged.stored == [PolicyVersion(0, step) for step in range(1, diverged.verdict.tripped_step)]
    assert max(diverged.rows) == diverged.verdict.tripped_step, "but its row, which tells why"
    asked = {PolicyVersion.parse(policy) for policy, _ in diverged.rig.gateway.asked}
    assert PolicyVersion(0, diverged.verdict.tripped_step) not in asked, "no further step was begun"


def test_reader_of_the_rows_reaches_the_trainers_verdict(diverged: Diverged, tmp_path: Path) -> None:
    detector, at = Detector(), {}
    for step in sorted(diverged.rows):
        detector = follow(detector, metrics.point_of(diverged.rows[step]), 0.5)
        at[step] = detector
    assert detector.verdict == diverged.verdict
    diverged.rig.restore(START, tmp_path / "start")
    assert read_detector(tmp_path / "start") == at[START.step], "a restart goes on with it"


def test_next_timeline_starts_from_its_fork_with_its_settings(diverged: Diverged, tmp_path: Path) -> None:
    rig = diverged.rig
    assert diverged.next_code == exit_codes.OK
    rows = rig.rows(timeline=1)
    assert sorted(rows) == list(range(START.step + 1, STEPS + 1))
    for step, values in rows.items():
        assert values["learning_rate"] == pytest.approx(CALM["learning_rate"] * (step - 1) / STEPS)
        # The gateway's stand-in samples from what is published: 1-STEP holds the trainer's weights.
        assert values["sampling/sampling_logp_difference/max"] < 1e-4
    asked = {PolicyVersion.parse(policy) for policy, _ in rig.gateway.asked}
    assert {at.step for at in asked if at.timeline == 1} == set(range(START.step, STEPS))
    assert rig.published()[-1] == PolicyVersion(1, STEPS - 1)
    rig.restore(PolicyVersion(1, STEPS), tmp_path / "last")
    record = from_json((tmp_path / "last" / RUN_FILE).read_bytes(), RunRecord, RUN_FILE)
    assert record.spec.grpo == {**rig.spec.grpo, **CALM}
    assert read_detector(tmp_path / "last").points == STEPS, "the detector knows what was before the start"
    beat = rig.last_beat()
    assert (beat.timeline, beat.step, beat.activity, tripped(beat)) == (1, STEPS, "done", False)


def test_next_timeline_drops_abandoned_checkpoints(diverged: Diverged) -> None:
    stored = diverged.rig.stored()
    assert [at for at in stored if at.timeline == 0] == [at for at in diverged.stored if at <= START]
    assert [at.step for at in stored if at.timeline == 1] == list(range(START.step + 1, STEPS + 1))
    assert find_spool(diverged.rig.work) is None


def test_trainer_out_of_memory_exits_with_its_code(tiny: Path, tmp_path: Path) -> None:
    launched = {"num_processes": 1, "use_cpu": True, "mixed_precision": "no", "distributed_type": "NO"}
    grpo = {"save_steps": 1}
    with open_rig(tmp_path, tiny, grpo=grpo, reward="rig_rewards.insatiable", accelerate=launched) as rig:
        launcher = rig.start_ranks()
        assert launcher.wait(HANG_S) == 1, "which is why the code is noted"
        assert take_exit_code(rig.work) == exit_codes.OUT_OF_MEMORY
        beat = rig.last_beat()
        assert (beat.activity, beat.step) == ("out_of_memory", 2)
        assert rig.stored()[-1] == PolicyVersion(0, 2)
        output = rig.log().read_text()
    ours, _, theirs = output.partition("grpo-orch trainer: out of memory at step 3: ")
    assert "can't allocate memory" in theirs.splitlines()[0]
    assert "Traceback" not in ours


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
    ],
)
def test_out_of_memory_errors_are_recognised(error: Exception, memory: bool) -> None:
    assert is_out_of_memory(error) == memory


def test_a_reward_function_of_weight_0_is_a_witness(tiny: Path, tmp_path: Path) -> None:
    grpo = {"max_steps": 2, "reward_weights": [1.0, 0.0]}
    with open_rig(tmp_path, tiny, grpo=grpo, witness="rig_rewards.digit_share") as rig:
        rig.train()
        rows = rig.trained()
    assert len(rows) == 2
    for values in rows:
        assert {name for name in values if name.startswith(WITNESS)} == {WITNESS + "digit_share"}
        assert values[WITNESS + "digit_share"] == pytest.approx(values["rewards/digit_share/mean"], abs=1e-6)
        assert values["reward"] == pytest.approx(values["rewards/lower_share/mean"], abs=1e-6)


def test_detector_that_raises_leaves_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, Any] = {}
    heartbeat = SimpleNamespace(update=lambda **values: said.update(values))
    watch = callbacks.DivergenceCallback(cast(Heartbeat, heartbeat), KlPolicy(), Detector())

    def log(step: int, kl: float) -> None:
        watch.on_log(None, SimpleNamespace(global_step=step), None, {"kl": kl, "reward": 0.5})

    log(1, 0.01)
    before = watch.detector
    with monkeypatch.context() as broken:
        broken.setattr(callbacks, "follow", lambda *_: min(()))
        log(2, 0.01)
    assert watch.detector is before
    for step in range(3, 24):
        log(step, 0.01 if step < 20 else 30.0)
    with pytest.raises(callbacks.Diverged):
        log(24, 30.0)  # the fifth of seven


class Breaks(TrainerCallback):
    """Makes no numbers of the weights behind the second step."""

    def on_step_end(self, _args: Any, state: Any, _control: Any, *, model: Any, **_: Any) -> None:
        if state.global_step == 2:
            model.get_input_embeddings().weight.data.fill_(torch.nan)


def test_nan_weights_diverged_at_the_step_that_made_them(tiny: Path, tmp_path: Path) -> None:
    """No node would serve them, so nothing would ever be logged by which the detector could tell."""
    steps = {"max_steps": 6, "save_steps": 1, "logging_steps": 3}
    with open_rig(tmp_path, tiny, grpo=steps, kl=KlPolicy()) as rig:
        with pytest.raises(callbacks.Diverged, match=r"since step 2: .*not numbers"):
            rig.train(Breaks())
        assert {policy for policy, _ in rig.gateway.asked} == {"0-0", "0-1"}
