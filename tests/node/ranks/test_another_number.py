"""A trainer that goes on with more or fewer processes than its checkpoint was made by."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.checkpoint.stream.manifest import files_below
from grpo_orch.checkpoint.stream.transfer import upload
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.machine.exit_note import take_exit_code
from tests.budget import HANG_S
from tests.node.ranks.kills import LAST, of
from tests.node.trainer.rig import Rig, open_rig


@pytest.fixture(scope="module", params=[1, 2])
def first(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A whole training by so many processes."""
    with open_rig(tmp_path_factory.mktemp("first"), tiny, **of(request.param)) as rig:
        assert rig.wait(rig.start_ranks()) == exit_codes.OK
        yield rig


def test_another_number_of_processes_goes_on(first: Rig, tiny: Path, tmp_path: Path) -> None:
    """With as many completions a step: the same prompts and seeds, and gradients that are rounded otherwise."""
    half, after = first.stored()[-2], 1 if "2" in first.spec.trainer.resources["accelerators"] else 2
    with open_rig(tmp_path / "after", tiny, **of(after)) as second:
        give_checkpoint(first, second, half)
        assert second.wait(second.start_ranks()) == exit_codes.OK
        assert second.stored()[-1] == LAST
    assert set(second.gateway.asked) <= set(first.gateway.asked)
    assert second.gateway.prompts.items() <= first.gateway.prompts.items()
    # Later steps are of weights that differ already.
    once, again = (rig.rows()[half.step + 1] for rig in (first, second))
    assert again["reward"] == once["reward"]
    assert again["grad_norm"] == pytest.approx(once["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("first", [1], indirect=True)
def test_another_batch_is_refused_in_one_line(first: Rig, tiny: Path, tmp_path: Path) -> None:
    half = first.stored()[-2]
    with open_rig(tmp_path / "after", tiny, **of(2, per_device_train_batch_size=8)) as second:
        give_checkpoint(first, second, half)
        launcher = second.start_ranks()
        assert launcher.wait(HANG_S) != 0
        assert take_exit_code(second.work) == exit_codes.BAD_SPEC
        said = second.log().read_text()
    assert "trainer: the checkpoint is of 1 processes, and 2 would resume from it: expected 8 completions" in said


def give_checkpoint(giver: Rig, taker: Rig, at: PolicyVersion) -> None:
    """Let another run begin from a checkpoint."""
    folder = taker.folder / "given"
    giver.restore(at, folder)
    upload(taker.store, Catalog(taker.store, "test"), files_below(folder), at, time.time(), {})
