"""The trainer as a process, over a gateway that breaks: what it leaves in the run store, and how it ends."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from grpo_orch.checkpoint.records import documents, metrics
from grpo_orch.checkpoint.store import layout
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import PolicyRef
from grpo_orch.policies.tick.snapshot import Trainer
from grpo_orch.tasks.machine.spooling import find_spool
from grpo_orch.tasks.rollout.policy_folders import PolicyFolders
from grpo_orch.tasks.storing.saving import read_detector
from tests.budget import HANG_S
from tests.node.trainer.rig import GRPO, REPOSITORY, Rig, open_rig
from tests.node.trainer.rig_rewards import lower_share

STEPS = 6
LENGTH = 6


@dataclass(frozen=True)
class Finished:
    """A run that went through a cut connection, a restarted gateway and a time without nodes, and its trainer
    started again after its end."""

    rig: Rig
    exit_codes: tuple[int, int]


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    grpo = {"max_steps": STEPS, "save_steps": 4, "eval_steps": 3, "per_device_eval_batch_size": 8}
    with open_rig(tmp_path_factory.mktemp("run"), tiny, grpo=grpo, evaluates=True) as rig:
        gateway = rig.gateway
        gateway.members, gateway.cut_after = 0, 3

        def again(made: int) -> None:
            if made == 20:  # in the third step: another gateway on another port
                gateway.close()
                gateway.open()

        gateway.on_completion = again
        trainer = rig.start_trainer()
        rig.until("waiting", lambda: waits(rig))
        gateway.members = 1
        codes = (rig.wait(trainer), rig.wait(rig.start_trainer(attempt=2), attempt=2))
        return Finished(rig, codes)


def waits(rig: Rig) -> bool:
    beat = rig.beat()
    return beat is not None and beat.activity == "waiting"


def test_run_completes(finished: Finished) -> None:
    assert finished.exit_codes == (exit_codes.OK, exit_codes.OK)
    beat = finished.rig.last_beat()
    assert (beat.activity, beat.step, beat.max_steps, beat.attempt) == ("done", STEPS, STEPS, 2)
    assert finished.rig.last_line().endswith("complete at step 6")
    assert finished.rig.last_line(2).endswith("nothing left to train: the run is complete at step 6")


def test_metrics_are_trls_and_ours(finished: Finished) -> None:
    rows = finished.rig.rows()
    assert sorted(rows) == list(range(1, STEPS + 1))
    for values in rows.values():
        assert {"loss", "reward", "kl", "grad_norm", "entropy", "rewards/lower_share/mean"} <= values.keys()
        assert values[metrics.REWARD_MIN] <= values["reward"] <= values[metrics.REWARD_MAX]
        assert 0 < values[metrics.TOKENS] <= 8 * LENGTH
        assert values[metrics.TOKENS] == pytest.approx(8 * values["completions/mean_length"])
        assert values[metrics.REPLAYED] == 0
        assert values[metrics.REWARDS_S] > 0
    assert any(values[metrics.STORE_S] > 0 for values in rows.values())
    assert [step for step, values in rows.items() if "eval_reward" in values] == [3, 6]
    # What a fault cost: three of the first eight were delivered before the cut, the fourth was on its way.
    assert rows[1][metrics.WAIT_S] > 0
    assert 1 <= rows[1][metrics.TOKENS_DISCARDED] <= LENGTH
    assert sum(values[metrics.TOKENS_DISCARDED] for values in rows.values()) == rows[1][metrics.TOKENS_DISCARDED]


def test_completions_come_from_the_trainers_own_weights(finished: Finished) -> None:
    """With importance sampling on, TRL compares each completion's log-probabilities with its own."""
    rows = finished.rig.rows().values()
    assert max(values["sampling/sampling_logp_difference/max"] for values in rows) < 1e-5
    assert finished.rig.gateway.unproved == []


def test_only_missing_completions_are_requested_again(finished: Finished) -> None:
    seen = finished.rig.gateway.asked
    asked = {policy: [seed for at, seed in seen if at == policy] for policy, _ in seen}
    assert len(asked["0-0"]) == 8 + 5
    assert {policy: len(seeds) for policy, seeds in asked.items() if policy not in ("0-0", "0-3", "0-6")} == {
        "0-1": 8,
        "0-2": 8,
        "0-4": 8,
        "0-5": 8,
    }
    assert (len(asked["0-3"]), len(asked["0-6"])) == (8 + 16, 16)  # evaluation, too
    assert len(set(asked["0-0"])) == 8
    assert len({seed for seeds in asked.values() for seed in seeds}) == 8 * STEPS + 16 * 2


def test_two_policies_are_kept_and_are_the_trainers(finished: Finished, tmp_path: Path) -> None:
    kept = finished.rig.published()
    assert kept == [PolicyVersion(0, STEPS - 1), PolicyVersion(0, STEPS)]
    ref = PolicyRef(str(kept[-1]), layout.policy(kept[-1], (0, 1, 1)))
    policy = PolicyFolders(finished.rig.store, tmp_path / "policies").fetch(ref, lambda: True)
    finished.rig.restore(kept[-1], tmp_path / "checkpoint")
    published = load_file(policy / "model.safetensors")
    saved = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert published.keys() == saved.keys()
    assert all(published[name].equal(saved[name]) for name in saved)
    assert (policy / "config.json").exists()


def test_checkpoints_include_the_detectors_state(finished: Finished, tmp_path: Path) -> None:
    assert finished.rig.stored() == [PolicyVersion(0, 4), PolicyVersion(0, STEPS)]
    stored = finished.rig.restore(PolicyVersion(0, 4), tmp_path / "checkpoint")
    assert read_detector(tmp_path / "checkpoint").points == 4
    names = {file.name for file in stored.files}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= names
    assert {"base_model/model.safetensors", "run.json", "grpo_window_0.pt"} <= names
    assert "training_args.bin" not in names, "a pickle"
    assert find_spool(finished.rig.work) is None, "its memory is given back at the end"


def test_frozen_weights_are_stored_once(finished: Finished, tmp_path: Path) -> None:
    first, last = (finished.rig.restore(PolicyVersion(0, step), tmp_path / str(step)) for step in (4, STEPS))
    shared = first.chunks & last.chunks
    for found in (first, last):
        base = next(file for file in found.files if file.name == "base_model/model.safetensors")
        assert set(base.chunks) <= shared


class Begun(TrainerCallback):
    """What a trainer holds when its first step begins."""

    def on_train_begin(
        self, _args: Any, state: Any, _control: Any, *, model: Any, optimizer: Any, **_: Any
    ) -> None:
        self.step = state.global_step
        self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.optimizer_steps = {int(values["step"]) for values in optimizer.state.values()}


def test_an_exported_checkpoint_is_one_of_hugging_face_and_trl(
    finished: Finished, tiny: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "exported"
    export = ["checkpoints", "export", "0-4", str(folder), finished.rig.store.url]
    command = [sys.executable, "-m", "grpo_orch", *export]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    saved = load_file(folder / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(loaded[name].equal(tensor) for name, tensor in saved.items())
    assert (folder / "base_model" / "model.safetensors").exists()

    own = {**GRPO, "max_steps": STEPS, "save_strategy": "no", "logging_steps": 1, "report_to": "none"}
    from trl import GRPOConfig, GRPOTrainer  # after `tasks.trl.trl_grpo`, which decides what TRL imports

    plain = GRPOTrainer(
        str(tiny / "model"),
        reward_funcs=lower_share,
        args=GRPOConfig(output_dir=str(tmp_path / "output"), use_vllm=False, **own),
        train_dataset=load_dataset("json", data_files=str(tiny / "few.jsonl"), split="train"),
        callbacks=[begun := Begun()],
    )
    plain.train(resume_from_checkpoint=str(folder))
    assert (begun.step, begun.optimizer_steps, plain.state.global_step) == (4, {4}, STEPS)
    assert all(begun.weights[name].equal(tensor) for name, tensor in saved.items())
    trained = plain.model.state_dict()
    assert not all(trained[name].equal(tensor) for name, tensor in saved.items())


def test_newer_trainer_stops_an_older_one_even_in_a_wait(tiny: Path, tmp_path: Path) -> None:
    with open_rig(tmp_path, tiny, grpo={}) as rig:
        rig.gateway.members = 0
        trainer = rig.start_trainer(attempt=1)
        rig.until("waiting", lambda: waits(rig))
        newer = Trainer("trainer-0-i2", 2, 0, 0, 8, "starting", time.time())

        def ended() -> bool:
            """As its heartbeat does, the newer one says it again: the older may write over what it did not see."""
            documents.TRAINER.write(rig.store, newer)
            return trainer.poll() is not None

        rig.until("ended", ended)
        assert trainer.wait() == exit_codes.FENCED
        assert documents.TRAINER.read(rig.store) == newer
        assert "attempt 2 on trainer-0-i2" in rig.last_line()
