"""A trainer that is killed and started again ends in the same weights, bit for bit, and no token is made twice."""

from __future__ import annotations

import math
import random
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.records import metrics, rollouts, samples
from grpo_orch.checkpoint.records.samples import Group
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.spec import CheckpointsSpec, Dataset
from grpo_orch.policies.model.vocabulary import PolicyVersion
from tests.budget import HANG_S
from tests.node.trainer.rig import GRPO, LORA, STATES, Rig, open_rig

STEPS = GRPO["max_steps"]

MADE = (
    Dataset(path="few.jsonl", prompt="rig_rewards.asks", weight=2),
    Dataset(path="prompts.jsonl", prompt="Count: {prompt}", streaming=True, weight=1),
)


@dataclass(frozen=True)
class Case:
    """A run, and after how many completions its first kill comes."""

    spec: dict[str, Any]
    first_kill: range
    replays: int  # steps after the newest checkpoint that the journal holds by then
    second_kill: bool = False


CASES = {
    "plain": Case(
        {"grpo": {"eval_steps": 3, "per_device_eval_batch_size": 8}, "evaluates": True},
        first_kill=range(41, 48),
        replays=1,
        second_kill=True,
    ),
    # Its checkpoints are in the middle of a generation window, whose rest is used after the restart. It draws
    # noise, follows the entropy that it has seen, and reads its rows ahead.
    "window": Case(
        {
            "grpo": {
                "steps_per_generation": 2,
                "num_iterations": 2,
                "save_steps": 3,
                "neftune_noise_alpha": 1.0,
                "use_adaptive_entropy": True,
                "entropy_target": 100.0,
                "dataloader_num_workers": 2,
            }
        },
        range(17, 32),
        0,
    ),
    # Before its first checkpoint: new adapters, drawn at random, must be the same ones.
    "lora": Case({"grpo": {"save_steps": 3}, "peft": LORA}, range(9, 16), 1),
    # Prompts that the trainer makes of rows: by a function, and of a stream that it reads again.
    "rows": Case({"grpo": {}, "dataset": MADE}, range(25, 32), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_killed_trainer_ends_in_the_same_weights(name: str, tiny: Path, tmp_path: Path) -> None:
    case, seed = CASES[name], random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    with open_rig(tmp_path / "calm", tiny, **case.spec) as calm:
        assert calm.wait(calm.start_trainer()) == 0
    with open_rig(tmp_path / "killed", tiny, **case.spec) as killed:
        # In the middle of a batch; then at any moment of a later step, generating, training or saving.
        kill_after_completion(killed, 1, dice.choice(case.first_kill))
        assert len(to_replay(killed)) == case.replays
        if case.second_kill:
            kill_at_step(killed, 2, dice.randrange(STEPS - 3, STEPS), delay_s=dice.random() * 0.3)
        replayed, journalled = to_replay(killed), journalled_steps(killed.store)
        asked_before = len(killed.gateway.asked)
        # In an interpreter of its own, which has other hashes of text than the one that trained without a kill.
        assert killed.wait(killed.start_trainer(3, forked=False), 3) == 0
        assert killed.digests(*STATES) == calm.digests(*STATES)
    assert killed.gateway.unproved == calm.gateway.unproved == []
    again = {PolicyVersion.parse(policy).step for policy, _ in killed.gateway.asked[asked_before:]}
    assert not again & journalled, "completions that the journal holds were asked for again"
    rows = killed.rows()
    assert all(rows[step + 1][metrics.REPLAYED] == 1 for step in replayed)
    assert killed.results() == calm.results()
    kept, found = read(calm.store), read(killed.store)
    both = kept.keys() & found.keys()  # on a busy machine steps are left out, which is said; a kill may lose some
    assert both
    assert [found[step] for step in both] == [kept[step] for step in both]
    if "samples_not_kept" not in calm.log().read_text():
        assert STEPS in kept or STEPS - 3 in kept
        # What no restart needs is deleted some time after a checkpoint: in one of the runs it may be there still.
        oldest = calm.stored()[-CheckpointsSpec().keep_last].step
        assert {step for step in found if step > oldest} <= kept.keys()
    assert len({loss for *_, loss in calm.results()}) == STEPS, "nothing was learned, so this proves nothing"


def read(store: Store) -> dict[int, list[Group]]:
    """What people read of each step that was kept: whole, and of the completions that it trained on."""
    found = {}
    for version, keys in samples.stored_calls(store).items():
        made = rollouts.stored_since(store, version).get((version, 0))
        if made is None:  # its uploader was ended while it deleted both
            continue
        trained = rollouts.read_rollout(store, made[0])
        head, groups = samples.read_samples(store, keys[0])
        found[head.step] = list(groups)
        assert (head.policy, head.step, len(keys)) == (str(version), version.step + 1, 1)
        told = [one for group in found[head.step] for one in group.samples]
        assert trained is not None
        assert [len(one.token_ids) for one in trained.completions] == [one.tokens for one in told]
        assert all(one.cut is not None and one.node == "stand-in" and one.completion for one in told)
        rows = {row.step: row.values for row in metrics.read_metrics(store)}
        apart = rows[head.step]["sampling/sampling_logp_difference/max"]  # with noise in the trainer it is large
        assert math.isclose(max(one.mismatch_max or 0 for one in told), apart, rel_tol=1e-5, abs_tol=1e-9)
        assert math.isclose(
            sum(one.reward or 0 for one in told) / len(told), rows[head.step]["reward"], abs_tol=1e-6
        )
        for group in found[head.step]:
            assert len(group.samples) == GRPO["num_generations"]
            assert abs(sum(one.advantage or 0 for one in group.samples)) < 1e-4
    assert found
    return found


def kill_after_completion(rig: Rig, attempt: int, count: int) -> None:
    """SIGKILL the trainer once the gateway has sent it so many completions of this attempt, and before it sends
    one more: who kills may be slower than what is left of a batch."""
    due, killed = threading.Event(), threading.Event()
    aim = rig.gateway.made + count

    def hold(made: int) -> None:
        if made >= aim:
            due.set()
            killed.wait(HANG_S)

    rig.gateway.on_completion = hold
    trainer = rig.start_trainer(attempt)
    try:
        until = time.monotonic() + HANG_S
        while not due.wait(0.05):
            assert trainer.poll() is None, rig.log(attempt).read_text()[-4000:]
            assert time.monotonic() < until, rig.log(attempt).read_text()[-4000:]
    finally:
        trainer.kill()
        trainer.wait(HANG_S)
        rig.gateway.on_completion = lambda _: None
        killed.set()


def kill_at_step(rig: Rig, attempt: int, step: int, delay_s: float) -> None:
    """SIGKILL the trainer `delay_s` after its heartbeat shows the step, unless it has ended by then."""
    trainer = rig.start_trainer(attempt)
    try:
        until = time.monotonic() + HANG_S
        while (beat := rig.beat()) is None or beat.attempt < attempt or beat.step < step:
            assert time.monotonic() < until, rig.log(attempt).read_text()[-4000:]
            assert trainer.poll() in (None, 0), rig.log(attempt).read_text()[-4000:]
            time.sleep(0.005)
        trainer.wait(delay_s)
    except subprocess.TimeoutExpired:
        pass  # still at work, as it should be
    finally:
        trainer.kill()
        trainer.wait(HANG_S)


def journalled_steps(store: Store) -> set[int]:
    """The steps whose training completions the journal holds."""
    keys = [entry.key for entry in store.entries(layout.ROLLOUTS)]
    return {version.step for version, call in map(layout.call_of, keys) if call == 0}


def to_replay(rig: Rig) -> set[int]:
    """The journalled steps that a trainer which starts now has to take again."""
    newest = max((at.step for at in rig.stored()), default=0)
    return {step for step in journalled_steps(rig.store) if step >= newest}
