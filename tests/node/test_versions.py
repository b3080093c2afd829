"""The nodes' environment is the one that is locked, and fit for both kinds of work."""

from __future__ import annotations

from grpo_orch.tasks.machine.versions import ROLLOUT, TRAINER, check_versions, locked_versions
from tests.stand_ins.installed import not_as_locked


def test_this_environment_is_the_nodes_lock() -> None:
    import torch

    assert not_as_locked("node" if torch.version.cuda else "node-cpu") == []
    assert torch.__version__.partition("+")[0] == locked_versions("node")["torch"]


def test_what_is_installed_is_fit_for_a_trainer_and_a_rollout_node() -> None:
    check_versions(TRAINER)
    check_versions(ROLLOUT)
