"""A run that learnt nothing does not say that it has finished."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_orch.checkpoint.records.metrics import NONFINITE, MetricsRow, MetricsWriter
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.detect.pitfalls import UNREWARDED_MAX
from grpo_orch.policies.detect.symptoms import NO_VARIANCE
from grpo_orch.policies.model import exit_codes
from grpo_orch.tasks.machine.exit_note import take_exit_code, take_reason
from grpo_orch.tasks.trainer.callbacks import RewardCounts, count_rewards
from grpo_orch.tasks.trainer.main import end_of_training, unexpected_error
from grpo_orch.tasks.trl.parts.rewards import NothingToLearn, Unrewarded
from tests.node.ranks.kills import of
from tests.node.trainer.rig import open_rig

TAUGHT = {"reward": 0.5, NO_VARIANCE: 0.75}
ALIKE = {"reward": 0.5, NO_VARIANCE: 1.0}
UNREWARDED = {NONFINITE + "reward": 1.0, NO_VARIANCE: 0.0}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/store")


def test_rewards_all_none_for_few_steps_stop_the_trainer(tiny: Path, tmp_path: Path) -> None:
    with open_rig(tmp_path, tiny, grpo={}, reward="rig_rewards.none") as rig:
        code = rig.start_trainer().wait()
        assert (code, rig.last_beat().activity) == (exit_codes.NOTHING_LEARNT, "nothing_learnt")
        last = rig.last_line()
        assert f"stopped at step {UNREWARDED_MAX}: none of 8 completions had a reward" in last
        assert last == f"grpo-orch trainer: {take_reason(rig.work)}"
        assert rig.log().read_text().count("no_reward") == 1
        assert [at.step for at in rig.stored()] == [2], "what was sealed is stored"


def test_rewards_all_none_stop_every_process(tiny: Path, tmp_path: Path) -> None:
    with open_rig(tmp_path, tiny, **of(2), reward="rig_rewards.none") as rig:
        assert rig.start_ranks().wait() != exit_codes.OK
        assert take_exit_code(rig.work) == exit_codes.NOTHING_LEARNT
        assert rig.last_beat().activity == "nothing_learnt", "all that was sealed is stored"


def test_groups_all_alike_finish_with_a_warning(tiny: Path, tmp_path: Path) -> None:
    """By epochs, of which TRL knows the number of steps only once it has the data."""
    grpo = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
    with open_rig(tmp_path, tiny, grpo=grpo, reward="rig_rewards.half") as rig:
        assert rig.wait(rig.start_trainer()) == exit_codes.OK
        beat, last = rig.last_beat(), rig.last_line()
    assert (beat.activity, beat.step, beat.max_steps) == ("done", 2, 2)
    assert "complete at step 2; no group ever had variance in its rewards: nothing was learnt" in last


@pytest.mark.parametrize(
    ("rows", "counts"),
    [
        ([], RewardCounts()),
        ([UNREWARDED, UNREWARDED], RewardCounts(2, 0, 0)),
        ([UNREWARDED, ALIKE], RewardCounts(2, 1, 0)),
        ([ALIKE, TAUGHT, ALIKE], RewardCounts(2, 2, 1)),
        ([{"eval_reward": 0.5}, ALIKE], RewardCounts(1, 1, 0)),
        ([{"reward": 0.5}], RewardCounts(1, 1, 1)),  # not logged: nothing is claimed
    ],
)
def test_rewards_are_counted_up_to_the_first(
    rows: list[dict[str, float]], counts: RewardCounts, store: Store
) -> None:
    writer = MetricsWriter(store)
    for step, values in enumerate(rows, 1):
        writer.append(MetricsRow(0, step, 0.0, 1, values))
    assert count_rewards(store) == counts


def test_unrewarded_batches_count_in_a_row() -> None:
    counter = Unrewarded()
    for _ in range(UNREWARDED_MAX - 1):
        counter.note(8, 0, ["score"])
    counter.note(8, 1, ["score"])
    for _ in range(UNREWARDED_MAX - 1):
        counter.note(8, 0, ["score"])
    counter.note(0, 0, ["score"])  # every prompt was refused
    with pytest.raises(NothingToLearn, match="none of 8 completions had a reward in 4 successive steps: score"):
        counter.note(8, 0, ["score"])


@pytest.mark.parametrize(
    ("step", "max_steps", "epoch", "asked_steps", "code"),
    [
        (8, 8, 2.0, 8, exit_codes.OK),
        (0, 3, 0.0, 3, exit_codes.FAILED),
        (7, 8, 2.0, 8, exit_codes.FAILED),
        (5, 6, 1.0, -1, exit_codes.OK),  # by epochs, of which transformers has guessed one step too many
        (5, 6, 0.8, -1, exit_codes.FAILED),
        (0, 6, 1.0, -1, exit_codes.FAILED),
    ],
)
def test_only_all_steps_are_complete(step: int, max_steps: int, epoch: float, asked_steps: int, code: int) -> None:
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(global_step=step, max_steps=max_steps, epoch=epoch),
        args=SimpleNamespace(max_steps=asked_steps, num_train_epochs=1.0),
        train_dataset=[1],
    )
    found, why = end_of_training(trainer)
    assert found == code
    assert code == exit_codes.OK or f"step {step} of {max_steps}" in why


@pytest.mark.parametrize(
    ("error", "is_first", "code"),
    [
        (KeyError("answer"), True, exit_codes.BAD_SPEC),
        (ImportError("no module"), True, exit_codes.BAD_SPEC),
        (KeyError("answer"), False, exit_codes.FAILED),
        (OSError("read"), True, exit_codes.FAILED),
        (RuntimeError("mat1 and mat2"), True, exit_codes.FAILED),
        (ConnectionResetError("reset"), True, exit_codes.UNAVAILABLE),
        (RuntimeError("CUDA out of memory"), True, exit_codes.OUT_OF_MEMORY),
    ],
)
def test_unexpected_errors_exit_by_their_remedy(
    error: Exception, is_first: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    found, why = unexpected_error(error, is_first=is_first, when="at step 1", trains=True)
    assert (found, "\n" in why) == (code, False)
    assert str(error) in why
