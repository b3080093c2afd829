"""A trainer that is killed and started again ends in the same weights, bit for bit, and no token is made twice."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from checkpoint import layout, manifest, metrics
from checkpoint.store import Store
from policies.vocabulary import PolicyVersion
from tests.node.trainer_rig import GRPO, Rig, make_tiny, open_rig

STEPS = GRPO["max_steps"]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"grpo": {"eval_steps": 3, "per_device_eval_batch_size": 8}, "evaluates": True},
    # A checkpoint in the middle of a generation window, whose other half is used after the restart.
    "window": {"grpo": {"steps_per_generation": 2, "num_iterations": 2, "save_steps": 1}},
    "lora": {"grpo": {"save_steps": 3}, "peft": LORA},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("case", CASES)
def test_killed_trainer_ends_in_the_same_weights(case: str, tiny: Path, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    with open_rig(tmp_path / "calm", tiny, **CASES[case]) as calm:
        assert calm.wait(calm.start_trainer()) == 0
        completions = calm.gateway.made
    with open_rig(tmp_path / "killed", tiny, **CASES[case]) as killed:
        # In the middle of a batch; then at any moment of a later step, generating, training or saving.
        kill_after_completion(killed, 1, dice.randrange(completions // 4, completions // 2))
        kill_at_step(killed, 2, dice.randrange(STEPS // 2, STEPS), delay_s=dice.random() * 0.3)
        journalled = {entry.key for entry in killed.store.entries(layout.ROLLOUTS)}
        asked_before = len(killed.gateway.asked)
        assert killed.wait(killed.start_trainer(3), 3) == 0
        assert not {
            key for key in journalled for policy, _ in killed.gateway.asked[asked_before:] if key_of(policy, key)
        }, "completions that the journal holds were asked for again"
    assert final_files(killed.store) == final_files(calm.store)
    assert rewards(killed.store) == rewards(calm.store)
    assert any(row.values.get(metrics.REPLAYED) == 1 for row in metrics.read_metrics(killed.store))
    moved = {row.values["reward"] for row in metrics.read_metrics(calm.store)}
    assert len(moved) > 2, "the run learned nothing, so equal weights would prove nothing"


def kill_after_completion(rig: Rig, attempt: int, count: int) -> None:
    """SIGKILL the trainer once the gateway has sent it so many completions of this attempt."""
    due = threading.Event()
    aim = rig.gateway.made + count
    rig.gateway.on_completion = lambda made: due.set() if made >= aim else None
    trainer = rig.start_trainer(attempt)
    try:
        assert due.wait(90), rig.log(attempt).read_text()[-4000:]
    finally:
        trainer.kill()
        trainer.wait(10)
        rig.gateway.on_completion = lambda _: None


def kill_at_step(rig: Rig, attempt: int, step: int, delay_s: float) -> None:
    """SIGKILL the trainer `delay_s` after its heartbeat shows the step, unless it has ended by then."""
    trainer = rig.start_trainer(attempt)
    try:
        until = time.monotonic() + 90
        while (beat := rig.beat()) is None or beat.attempt < attempt or beat.step < step:
            assert time.monotonic() < until, rig.log(attempt).read_text()[-4000:]
            assert trainer.poll() in (None, 0), rig.log(attempt).read_text()[-4000:]
            time.sleep(0.005)
        trainer.wait(delay_s)
    except subprocess.TimeoutExpired:
        pass  # still at work, as it should be
    finally:
        trainer.kill()
        trainer.wait(10)


def key_of(policy: str, key: str) -> bool:
    """Whether the journal's key is a record of that policy."""
    return layout.version_of(key) == PolicyVersion.parse(policy) and not key.endswith("-1000.json")


def final_files(store: Store) -> dict[str, str]:
    """Digests of what the last checkpoint makes of the run: weights, optimizer, scheduler, random state."""
    found = manifest.load(store, layout.checkpoint(PolicyVersion(0, STEPS)))
    digests = {file.name: file.digest for file in found.files}
    weights = [name for name in digests if name.endswith(".safetensors")]
    assert weights
    return {name: digests[name] for name in [*weights, "optimizer.pt", "scheduler.pt", "rng_state.pth"]}


def rewards(store: Store) -> list[tuple[int, float, float]]:
    rows = metrics.read_metrics(store)
    return [(row.step, row.values["reward"], row.values["loss"]) for row in rows]
