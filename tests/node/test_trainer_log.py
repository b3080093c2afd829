"""The log that a Trainer's progress bar and dictionaries make together is read with its own steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_orch.orchestrator.traces.read import read_traces
from tests.budget import HANG_S

# Standard output and error in one file, as `nohup` leaves them: transformers' own callback, called as its Trainer
# does.
PROGRAM = """
import sys, time
from transformers.trainer_callback import ProgressCallback, TrainerState

every, evaluate, pause_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
state, bars = TrainerState(max_steps=60), ProgressCallback()
bars.on_train_begin(None, state, None)
for state.global_step in range(1, 61):
    time.sleep(pause_s)
    bars.on_step_end(None, state, None)
    if state.global_step % every == 0:
        bars.on_log(None, state, None, logs={"loss": 0.1, "kl": state.global_step / 1000, "epoch": 0.1})
    if state.global_step % evaluate == 0:
        for _ in range(8):
            bars.on_prediction_step(None, state, None, eval_dataloader=range(8))
        bars.on_log(None, state, None, logs={"eval_reward": 0.5})
        bars.on_evaluate(None, state, None)
bars.on_train_end(None, state, None)
"""


# Steps slower than the bar is drawn, and faster.
@pytest.mark.parametrize(("every", "evaluate", "pause_s"), [(1, 100, 0.12), (5, 20, 0.0)])
def test_a_trainers_log_is_read_with_its_steps(every: int, evaluate: int, pause_s: float, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    with log.open("wb") as out:
        words = [sys.executable, "-u", "-c", PROGRAM, str(every), str(evaluate), str(pause_s)]
        subprocess.run(words, stdout=out, stderr=subprocess.STDOUT, check=True, timeout=HANG_S)
    (one,) = read_traces(log)
    found = {point.step: point.values["kl"] for point in one.points}
    assert found == {step: step / 1000 for step in range(every, 61, every)}
