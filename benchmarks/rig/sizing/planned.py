"""What is planned for a case, beside what its step allocates."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.rig.sizing.step import Case, peaks_of
from grpo_orch.policies.model.spec import Dataset, RunSpec, TrainerSpec
from grpo_orch.policies.sizing.memory import moments
from grpo_orch.policies.sizing.shapes import shape_of
from grpo_orch.policies.sizing.training import training_of


@dataclass(frozen=True, slots=True)
class Compared:
    """Bytes of the tensors that are alive at most, and the moment at which that is planned to be."""

    name: str
    planned: int
    allocated: int
    moment: str

    @property
    def ratio(self) -> float:
        return self.planned / self.allocated


def compared(case: Case) -> Compared:
    """Plan the case, take its step as on a GPU, and return both."""
    data = Dataset(path="prompts.jsonl")
    trainer = TrainerSpec(model="model", dataset=data, reward_funcs=(), peft=case.peft)
    spec = RunSpec(name=case.name, storage="file:///store", trainer=trainer, grpo=case.grpo)
    shape = shape_of(case.config)
    planned = moments(shape, training_of(spec, shape, case.prompt_tokens))
    highest = max(planned, key=lambda one: one.total_bytes)
    return Compared(case.name, highest.total_bytes, max(peaks_of(case).values()), highest.moment)
