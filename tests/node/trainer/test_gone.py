"""A trainer whose weights are no numbers any more: no node would serve them, so nothing would ever be logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from checkpoint.records import documents
from policies.control.snapshot import Trainer
from policies.detect.divergence import Health
from policies.model.spec import KlPolicy
from tasks.machine.leaving import Leaving
from tasks.machine.node_env import NodeEnv
from tasks.storing.heartbeat import Heartbeat
from tasks.trainer.assemble import assemble
from tasks.trainer.callbacks import Diverged
from tests.node.trainer.rig import make_tiny, open_rig
from tests.node.trainer.stand_in_gateway import TOKEN

GONE_BEHIND = 2


class Breaks(TrainerCallback):
    def on_step_end(self, _args: Any, state: Any, _control: Any, *, model: Any, **_: Any) -> None:
        if state.global_step == GONE_BEHIND:
            model.get_input_embeddings().weight.data.fill_(torch.nan)


def test_it_has_diverged_since_the_step_that_made_them_so(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny")
    steps = {"max_steps": 6, "save_steps": 1, "logging_steps": 3}
    with open_rig(tmp_path / "run", tiny, grpo=steps, kl=KlPolicy()) as rig:
        env = NodeEnv(rig.store.url, "trainer-0-i1", TOKEN, 1, 0, str(rig.work), "127.0.0.1")
        beat = Trainer(env.node, 1, 0, 0, 0, "starting", 0.0)
        heartbeat = Heartbeat(rig.store, beat)
        heartbeat.start()
        trainer, _ = assemble(env, documents.read_run(rig.store), rig.store, heartbeat, Leaving(rig.work, 1), None)
        trainer.add_callback(Breaks())
        with pytest.raises(Diverged, match=f"since step {GONE_BEHIND}: .*not numbers"):
            trainer.train()
        assert trainer.state.global_step == GONE_BEHIND
        heartbeat.stop("diverged")
        said = documents.TRAINER.read(rig.store)
        assert said is not None
        assert said.verdict is not None
        assert (said.verdict.health, said.verdict.onset_step) == (Health.TRIPPED, GONE_BEHIND)
