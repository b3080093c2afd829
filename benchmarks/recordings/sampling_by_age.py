"""How far policies of one run differ in the log-probability of a token, by the updates between them.

`python -m benchmarks.recordings.sampling_by_age OUT.json`, in .venv-node, where `build/recordings` has the small
model. It is TRL's `sampling/sampling_logp_difference/mean` between two policies that the same engine computes.
Completions are sampled from the policy of one update before, as with `rollout.max_staleness: 1`.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from trl import GRPOTrainer

from benchmarks.recordings import grpo
from benchmarks.recordings.record import MODELS, quiet, train_models
from benchmarks.recordings.regimes import REGIMES

AGES = (1, 2, 4, 8, 16, 32)
# Regime, learning rate, steps: the first four learn, the last breaks.
RUNS = (
    ("usual-sort", 3e-5, 80),
    ("usual-sort", 1e-4, 100),
    ("lora-kl-rises", 1.5e-3, 80),
    ("usual-sort", 3e-4, 100),
    ("usual-sort", 1e-3, 80),
)
KEPT = ("step", "reward", "kl", "entropy", "grad_norm", "completions/mean_length", "frac_reward_zero_std")


class AgesTrainer(grpo.RegimeTrainer):
    """Samples from the policy of one update before, and compares the present one with older ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._policies: deque[dict[str, torch.Tensor]] = deque(maxlen=AGES[-1] + 1)
        self.differences: list[dict[int, float]] = []
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        self._policies.append(copy.deepcopy(self.model.state_dict()))
        self.model.load_state_dict(self._policies[max(-2, -len(self._policies))])
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            self.model.load_state_dict(self._policies[-1])

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)
        present = self._logprobs(0, found)
        mask = found["completion_mask"].bool()
        ages = [age for age in AGES if age < len(self._policies)]
        self.differences.append(
            {age: (present - self._logprobs(age, found)).abs()[mask].mean().item() for age in ages}
        )
        self.model.load_state_dict(self._policies[-1])
        return found

    def _logprobs(self, age: int, batch: Any) -> torch.Tensor:
        self.model.load_state_dict(self._policies[-1 - age])
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        length = batch["completion_ids"].size(1)
        with torch.no_grad():
            logprobs, *_ = GRPOTrainer._get_per_token_logps_and_entropies(self, self.model, ids, mask, length)
        found: torch.Tensor = logprobs
        return found


def measure(name: str, rate: float, steps: int) -> dict[str, Any]:
    """One run: its rows, and by age the difference at each step, None where no policy is that old."""
    regime = REGIMES[name]
    regime = replace(regime, steps=steps, grpo={**regime.grpo, "learning_rate": rate})
    made: list[AgesTrainer] = []

    def make(*args: Any, **kwargs: Any) -> AgesTrainer:
        made.append(AgesTrainer(*args, **kwargs))
        return made[0]

    with tempfile.TemporaryDirectory() as folder:
        rows = grpo.run(regime, MODELS, Path(folder), make)
    differences = made[0].differences
    return {
        "regime": name,
        "learning_rate": rate,
        "rows": [{key: row.get(key) for key in KEPT} for row in rows],
        "difference": {age: [rounded(one.get(age)) for one in differences] for age in AGES},
    }


def rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    train_models({REGIMES[name].model for name, *_ in RUNS})
    quiet()
    out.write_text("[\n" + ",\n".join(json.dumps(measure(*run)) for run in RUNS) + "\n]\n")


if __name__ == "__main__":
    main()
