"""A trainer that goes on with more or fewer processes than its checkpoint was made by."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.checkpoint.stream.manifest import files_below
from grpo_orch.checkpoint.stream.transfer import upload
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.vocabulary import PolicyVersion
from tests.node.ranks.kills import LAST, of
from tests.node.trainer.rig import Rig, open_rig


def test_checkpoint_resumes_with_another_number_of_processes(tiny: Path, tmp_path: Path) -> None:
    """With as many completions a step: the same prompts and seeds, and gradients that are rounded otherwise."""
    with ExitStack() as stack:
        one, two, one_again = (
            stack.enter_context(open_rig(tmp_path / str(number), tiny, **of(processes)))
            for number, processes in enumerate((1, 2, 1))
        )
        assert one.wait(one.start_ranks()) == exit_codes.OK
        for first, second, at in ((one, two, PolicyVersion(0, 2)), (two, one_again, PolicyVersion(0, 4))):
            give_checkpoint(first, second, at)
            assert second.wait(second.start_ranks()) == exit_codes.OK
            assert second.stored()[-1] == LAST
            assert set(second.gateway.asked) <= set(first.gateway.asked)
            assert second.gateway.prompts.items() <= first.gateway.prompts.items()
            # Later steps are of weights that differ already.
            once, again = (rig.rows()[at.step + 1] for rig in (first, second))
            assert again["reward"] == once["reward"]
            assert again["grad_norm"] == pytest.approx(once["grad_norm"], rel=1e-4)


def give_checkpoint(giver: Rig, taker: Rig, at: PolicyVersion) -> None:
    """Let another run begin from a checkpoint."""
    folder = taker.folder / "given"
    giver.restore(at, folder)
    upload(taker.store, Catalog(taker.store, "test"), files_below(folder), at, time.time(), {})
