"""The run as it takes effect: what the file says, else the default; and TRL's arithmetic on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from orchestrator.config.foreign_keys import grpo_table
from orchestrator.config.problems import Findings
from policies.model.processes import processes_in


class Doubtful(Exception):
    """A value that a check needs was reported already."""


class EffectiveRun:
    """A run.yaml's values, with the defaults of TRL where it has none. Each raises Doubtful."""

    def __init__(self, data: Mapping[str, Any], findings: Findings) -> None:
        self._data = data
        self._findings = findings

    def at(self, *path: str) -> Any:
        """The value in the file, None where there is none."""
        if self._findings.doubtful(path):
            raise Doubtful
        value: Any = self._data
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def grpo(self, key: str) -> Any:
        """A GRPOConfig key: the file's value or TRL's default. Ours are not in force yet."""
        value = self.at("grpo", key)
        return grpo_table().default(key) if value is None else value

    @property
    def processes(self) -> int:
        """How many processes train."""
        return processes_in(self.at("trainer", "accelerate") or {}, self.at("trainer", "resources") or {})

    @property
    def generation_batch(self) -> int:
        """Completions generated at once, as `GRPOConfig.__post_init__` computes it."""
        explicit = self.grpo("generation_batch_size")
        if explicit is not None:
            return int(explicit)
        return int(self.grpo("per_device_train_batch_size")) * self.processes * self.steps_per_generation

    @property
    def steps_per_generation(self) -> int:
        """Batches per generation, as `GRPOConfig.__post_init__` computes it."""
        explicit = self.grpo("generation_batch_size")
        if explicit is not None:
            return int(explicit) // (int(self.grpo("per_device_train_batch_size")) * self.processes)
        return int(self.grpo("steps_per_generation") or self.grpo("gradient_accumulation_steps"))

    @property
    def window(self) -> int:
        """Optimizer steps from one that begins with a generation to the next: only there a resume is exact."""
        micro_batches = max(1, self.steps_per_generation * int(self.grpo("num_iterations")))
        return micro_batches // math.gcd(micro_batches, int(self.grpo("gradient_accumulation_steps")))
