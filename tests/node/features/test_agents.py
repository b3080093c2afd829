"""A run whose completions are an agent's sessions, through deaths of all kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from policies.model.spec import AgentSpec
from tests.node.trainer.rig import GRPO, STATES, Rig, open_rig

STEPS = 4
GROUP = GRPO["per_device_train_batch_size"]  # sessions of a step
AGENT = AgentSpec(run="rig_agents.solve", tokens=100)


def of_agent(agent: AgentSpec = AGENT, **spec: Any) -> dict[str, Any]:
    grpo = {"max_steps": STEPS, **spec.pop("grpo", {})}
    return {"reward": None, "trainer": {"agent": agent}, "grpo": grpo, "on_bad_reward": "none", **spec}


def sessions_of(rig: Rig, tiny: Path) -> Any:
    return rig.gateway.take_sessions(AutoTokenizer.from_pretrained(tiny / "model"))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Rig]:
    with open_rig(tmp_path_factory.mktemp("calm"), tiny, **of_agent()) as rig:
        sessions_of(rig, tiny)
        assert rig.wait(rig.start_trainer()) == 0
        yield rig


def test_sessions_are_trained_on_with_their_masks(calm: Rig) -> None:
    rows = calm.trained()
    assert len(rows) == STEPS
    assert len({loss for *_, loss in calm.results()}) == STEPS
    for row in rows:
        assert row["agent/turns"] == 3
        assert row["agent/failed"] == 0
        assert 0 < row["rewards/agent/mean"] == row["reward"]
        assert row["sampling/sampling_logp_difference/max"] < 1e-4  # what the agent said is in no sum
    assert calm.gateway.sessions is not None
    assert len(calm.gateway.sessions.opened) == STEPS * GROUP
    assert len(calm.gateway.sessions.forgotten) >= (STEPS - 1) * GROUP


def test_in_process(tiny: Path, tmp_path: Path) -> None:
    with open_rig(tmp_path, tiny, **of_agent(grpo={"max_steps": 1})) as rig:
        sessions_of(rig, tiny)
        rig.train()
        print(rig.rows())
        _ = STATES
