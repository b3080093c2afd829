"""What of joining needs the node's libraries: a worker's own account of its weights, and the hub's headers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from grpo_orch.tasks.rollout.vllm.server import PolicyRefused
from grpo_orch.tasks.rollout.vllm.worker import Extension
from grpo_orch.tasks.trl.canary import canary_of
from tests.node.rollout.engines import Node, dense_model, policy, without_a_layer


def test_a_worker_tells_which_parameters_have_had_no_weights() -> None:
    loaded: list[str] = []

    def load_weights(weights: list[str]) -> set[str]:
        loaded.extend(weights)
        return set(weights)

    model = SimpleNamespace(
        named_parameters=lambda: [(name, None) for name in ("a", "b", "head")], load_weights=load_weights
    )
    worker: Any = SimpleNamespace(
        get_model=lambda: model, vllm_config=SimpleNamespace(load_config=SimpleNamespace(load_format="dummy"))
    )
    worker_class = cast("Any", Extension)
    worker_class.await_weights(worker)
    assert worker.vllm_config.load_config.load_format == "auto"
    assert worker_class.missing_weights(worker) == sorted(["a", "b", "head"])
    model.load_weights(["a", "b"])
    assert worker_class.missing_weights(worker) == ["head"]
    model.load_weights(["head"])
    assert worker_class.missing_weights(worker) == []
    assert loaded == ["a", "b", "head"]


def test_an_engine_without_weights_serves_nobody_before_it_has_all_of_them(tmp_path: Path) -> None:
    """Were the files not looked at: a policy that lacks tensors leaves it without, and the next one does not."""
    (tmp_path / "base").mkdir()
    dense_model(tmp_path / "base", seed=0)
    (tmp_path / "base" / "model.safetensors").unlink()  # of the base model it reads all but the weights
    node = Node(tmp_path, "bfloat16", bare=True)
    try:
        assert node.asked("0-0") == node.asked("None") == node.asked("") == 409
        lacking = policy(tmp_path / "lacking", dense_model(tmp_path / "made", seed=1), without_a_layer)
        with pytest.raises(PolicyRefused, match=r"the first policy has no weights for model\.layers\.1\."):
            node.load("0-0", lacking, None)
        assert node.asked("0-0") == 409
        made = dense_model(tmp_path / "made", seed=2)
        node.load("0-1", policy(tmp_path / "whole", made), canary_of(made, "no"))
        assert node.asked("0-1") == 200
    finally:
        node.stop()
