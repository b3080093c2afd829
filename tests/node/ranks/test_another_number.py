"""A trainer that goes on with more or fewer processes than its checkpoint was made by."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from checkpoint.records import metrics
from checkpoint.stream.catalog import Catalog
from checkpoint.stream.manifest import files_below
from checkpoint.stream.transfer import upload
from policies.model import exit_codes
from policies.model.vocabulary import PolicyVersion
from tasks.machine.exit_note import take_exit_code
from tests.budget import HANG_S
from tests.node.ranks.test_killed import LAST, of
from tests.node.trainer.rig import Rig, make_tiny, open_rig


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_processes_goes_on(before: int, after: int, tiny: Path, tmp_path: Path) -> None:
    """With as many completions a step: the same prompts and seeds, and gradients that are rounded otherwise."""
    with open_rig(tmp_path / "before", tiny, **of(before)) as first:
        assert first.wait(first.start_ranks()) == exit_codes.OK
        half = first.stored()[-2]
    with open_rig(tmp_path / "after", tiny, **of(after)) as second:
        give_checkpoint(first, second, half)
        assert second.wait(second.start_ranks()) == exit_codes.OK
        assert second.stored()[-1] == LAST
    assert set(second.gateway.asked) <= set(first.gateway.asked)
    assert second.gateway.prompts.items() <= first.gateway.prompts.items()
    once, again = (first_step_after(half, rig) for rig in (first, second))
    assert again["reward"] == once["reward"]
    assert again["grad_norm"] == pytest.approx(once["grad_norm"], rel=1e-4)


def test_another_batch_is_refused_in_one_line(tiny: Path, tmp_path: Path) -> None:
    with open_rig(tmp_path / "before", tiny, **of(1)) as first:
        assert first.wait(first.start_ranks()) == exit_codes.OK
        half = first.stored()[-2]
    with open_rig(tmp_path / "after", tiny, **of(2, per_device_train_batch_size=8)) as second:
        give_checkpoint(first, second, half)
        launcher = second.start_ranks()
        assert launcher.wait(HANG_S) != 0
        assert take_exit_code(second.work) == exit_codes.BAD_SPEC
        said = second.log().read_text()
    assert "trainer: the checkpoint is of 1 processes, and 2 are to go on from it: expected 8 completions" in said


def first_step_after(at: PolicyVersion, rig: Rig) -> dict[str, float]:
    """What was logged of it: later ones are of weights that differ already."""
    return next(row.values for row in metrics.read_metrics(rig.store) if row.step == at.step + 1)


def give_checkpoint(giver: Rig, taker: Rig, at: PolicyVersion) -> None:
    """Let another run begin from a checkpoint."""
    folder = taker.folder / "given"
    giver.restore(at, folder)
    upload(taker.store, Catalog(taker.store, "test"), files_below(folder), at, time.time(), {})
