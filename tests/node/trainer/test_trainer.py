"""The trainer as a process, over a gateway that breaks: what it leaves in the run store, and how it ends."""

from __future__ import annotations

import errno
import math
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from checkpoint.records import documents, metrics
from checkpoint.records.documents import RunRecord
from checkpoint.store import layout
from checkpoint.store.run_store import Store
from policies.control.snapshot import Trainer
from policies.model import exit_codes
from policies.model.spec import Dataset
from policies.model.vocabulary import PolicyVersion
from policies.serving.wire import PolicyRef
from tasks.machine.leaving import Leaving
from tasks.machine.node_env import NodeEnv
from tasks.machine.spooling import find_spool
from tasks.rollout.policy_folders import PolicyFolders
from tasks.storing.heartbeat import Heartbeat
from tasks.storing.saving import read_detector
from tasks.trainer.assemble import assemble
from tasks.trainer.user_objects import BadSpec, passes
from tests.budget import HANG_S
from tests.node.trainer.rig import GRPO, REPOSITORY, Rig, make_tiny, open_rig, run_spec
from tests.node.trainer.rig_rewards import lower_share

STEPS = 6
LENGTH = 6


@dataclass(frozen=True)
class Finished:
    """A run that went through a cut connection, a restarted gateway and a time without nodes, and its trainer
    started again after its end."""

    store: Store
    exit_codes: tuple[int, int]
    asked: list[tuple[str, int]]
    output: str
    rig: Rig


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    grpo = {"max_steps": STEPS, "save_steps": 4, "eval_steps": 3, "per_device_eval_batch_size": 8}
    folder = tmp_path_factory.mktemp("run")
    with open_rig(folder, tiny, grpo=grpo, evaluates=True) as rig:
        gateway = rig.gateway
        gateway.members, gateway.cut_after = 0, 3

        def again(made: int) -> None:
            if made == 20:  # in the third step: another gateway on another port
                gateway.close()
                gateway.open()

        gateway.on_completion = again
        trainer = rig.start_trainer()
        wait_for_activity(rig, "waiting")
        gateway.members = 1
        codes = (rig.wait(trainer), rig.wait(rig.start_trainer(attempt=2), attempt=2))
        output = rig.log(1).read_text() + rig.log(2).read_text()
        return Finished(rig.store, codes, gateway.asked, output, rig)


def wait_for_activity(rig: Rig, activity: str) -> None:
    until = time.monotonic() + HANG_S
    while (beat := rig.beat()) is None or beat.activity != activity:
        assert time.monotonic() < until, rig.log().read_text()[-4000:]
        time.sleep(0.01)


def rows_of(run: Finished) -> dict[int, dict[str, float]]:
    return {row.step: row.values for row in metrics.read_metrics(run.store)}


def test_run_completes(finished: Finished) -> None:
    assert finished.exit_codes == (exit_codes.OK, exit_codes.OK)
    beat = documents.TRAINER.read(finished.store)
    assert beat is not None
    assert (beat.activity, beat.step, beat.max_steps, beat.attempt) == ("done", STEPS, STEPS, 2)
    assert "complete at step 6\n" in finished.output
    assert "nothing left to train: the run is complete at step 6" in finished.output


def test_metrics_are_trls_and_ours(finished: Finished) -> None:
    rows = rows_of(finished)
    assert sorted(rows) == list(range(1, STEPS + 1))
    for values in rows.values():
        assert {"loss", "reward", "kl", "grad_norm", "entropy", "rewards/lower_share/mean"} <= values.keys()
        assert values[metrics.REWARD_MIN] <= values["reward"] <= values[metrics.REWARD_MAX]
        assert 0 < values[metrics.TOKENS] <= 8 * LENGTH
        assert values[metrics.TOKENS] == pytest.approx(8 * values["completions/mean_length"])
        assert values[metrics.REPLAYED] == 0
    assert [step for step, values in rows.items() if "eval_reward" in values] == [3, 6]


def test_completions_come_from_the_trainers_own_weights(finished: Finished) -> None:
    """With importance sampling on, TRL compares each completion's log-probabilities with its own."""
    worst = [values["sampling/sampling_logp_difference/max"] for values in rows_of(finished).values()]
    assert max(worst) < 1e-5


def test_each_policy_computes_what_its_trainer_says(finished: Finished) -> None:
    assert finished.rig.gateway.unproved == []


def test_what_a_fault_cost_is_told(finished: Finished) -> None:
    rows = rows_of(finished)
    assert rows[1][metrics.WAIT_S] > 0
    # Three of the first eight were delivered before the cut, the fourth was on its way.
    assert 1 <= rows[1][metrics.TOKENS_DISCARDED] <= LENGTH
    assert sum(values[metrics.TOKENS_DISCARDED] for values in rows.values()) == rows[1][metrics.TOKENS_DISCARDED]


def test_scoring_and_storing_are_timed(finished: Finished) -> None:
    rows = rows_of(finished)
    assert all(values[metrics.REWARDS_S] > 0 for values in rows.values())
    assert any(values[metrics.STORE_S] > 0 for values in rows.values())


def test_only_what_is_missing_is_asked_for_again(finished: Finished) -> None:
    asked = {policy: [seed for at, seed in finished.asked if at == policy] for policy, _ in finished.asked}
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
    policy = PolicyFolders(finished.store, tmp_path / "policies").fetch(ref, lambda: True)
    finished.rig.restore(kept[-1], tmp_path / "checkpoint")
    published = load_file(policy / "model.safetensors")
    saved = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert published.keys() == saved.keys()
    assert all(published[name].equal(saved[name]) for name in saved)
    assert (policy / "config.json").exists()


def test_checkpoints_and_what_the_detector_knows(finished: Finished, tmp_path: Path) -> None:
    assert finished.rig.stored() == [PolicyVersion(0, 4), PolicyVersion(0, STEPS)]
    stored = finished.rig.restore(PolicyVersion(0, 4), tmp_path / "checkpoint")
    assert {"torch", "trl", "transformers", "python"} <= stored.meta.keys()
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
    export = ["checkpoints", "export", "0-4", str(folder), finished.store.url]
    command = [sys.executable, "-m", "orchestrator", *export]
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


def test_newer_trainer_stops_an_older_one_even_while_it_waits(tiny: Path, tmp_path: Path) -> None:
    with open_rig(tmp_path, tiny, grpo={}) as rig:
        rig.gateway.members = 0
        trainer = rig.start_trainer(attempt=1)
        wait_for_activity(rig, "waiting")
        newer = Trainer("trainer-0-i2", 2, 0, 0, 8, "starting", time.time())

        def ended() -> bool:
            """As its heartbeat does, the newer one says it again: the older may write over what it did not see."""
            documents.TRAINER.write(rig.store, newer)
            return trainer.poll() is not None

        rig.until("ended", ended)
        assert trainer.wait() == exit_codes.FENCED
        assert documents.TRAINER.read(rig.store) == newer
        assert "attempt 2 on trainer-0-i2" in rig.log().read_text().splitlines()[-1]


def test_bad_spec_is_one_line_and_its_own_exit_code(tiny: Path, tmp_path: Path) -> None:
    with open_rig(tmp_path, tiny, grpo={}, model="nobody/has-this-model") as rig:
        assert rig.start_trainer().wait(HANG_S) == exit_codes.BAD_SPEC
        output = rig.log().read_text()
    assert "Traceback" not in output
    assert output.splitlines()[-1].startswith("grpo-orch trainer: trainer.model nobody/has-this-model")


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("model", "./nowhere", "trainer.model: there is no folder"),
        ("dataset", "./nowhere.jsonl", "trainer.dataset: there is no file or folder"),
        ("reward_funcs", ("rig_rewards.lower_shares",), "has no attribute 'lower_shares'"),
        ("reward_funcs", ("no_such_module.reward",), "No module named 'no_such_module'"),
        ("peft", {"rank": 4}, "trainer.peft: "),
        ("grpo", {"num_generations": 3}, "grpo: generation_batch_size (8) must be divisible by num_generations"),
        ("grpo", {"learning_rat": 1e-3}, "unexpected keyword argument 'learning_rat'"),
        ("grpo", {"generation_kwargs": {"seed": 1}}, "generation_kwargs: `seed` must go"),
    ],
)
def test_users_mistakes_are_named(part: str, value: Any, says: str, tiny: Path, tmp_path: Path) -> None:
    spec = run_spec(f"file://{tmp_path}/store", tiny, grpo=value if part == "grpo" else {})
    if part == "dataset":
        spec = replace(spec, trainer=replace(spec.trainer, dataset=Dataset(path=str(value))))
    elif part != "grpo":
        spec = replace(spec, trainer=replace(spec.trainer, **{part: value}))
    store = Store(spec.storage)
    env = NodeEnv(store.url, "trainer-0-i1", "secret", 1, 0, str(tmp_path), "127.0.0.1")
    heartbeat = Heartbeat(store, Trainer(env.node, 1, 0, 0, 0, "starting", 0.0))
    with pytest.raises(BadSpec) as caught:
        assemble(env, RunRecord(documents.SCHEMA, "id", 0.0, spec), store, heartbeat, Leaving(tmp_path, 1), None)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("offline", "error", "again"),
    [
        (False, OSError(errno.ENOSPC, "No space left on device"), True),
        (False, FileNotFoundError(errno.ENOENT, "no such file"), False),
        (False, ValueError("bad"), False),
        (False, LocalEntryNotFoundError("cannot find the requested files in the cache, no connection"), True),
        (True, LocalEntryNotFoundError("cannot find the requested files in the cache"), False),
        (True, OSError(errno.ENOSPC, "No space left on device"), True),
    ],
)
def test_a_hub_out_of_reach_is_not_the_users_mistake(
    offline: bool, error: Exception, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a restart in an hour without the hub would end the run for good."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    wrapped = OSError("We couldn't connect")
    wrapped.__cause__ = error
    assert passes(wrapped) == again


def test_numbers_json_cannot_carry_leave_a_marker() -> None:
    from tasks.trainer.callbacks import storable

    logs = {"kl": math.nan, "grad_norm": math.inf, "reward": None, "loss": 0.5, "epoch": 1, "name": "x"}
    assert storable(logs) == {
        "orch/nonfinite/kl": 1.0,
        "orch/nonfinite/grad_norm": 1.0,
        "orch/nonfinite/reward": 1.0,
        "loss": 0.5,
        "epoch": 1.0,
    }
