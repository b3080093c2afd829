"""What becomes of a part that a process of the trainer cannot make: the run waits for nodes, as if untried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator

from grpo_orch.policies.serving.wire import Batch, Completion, CompletionRequest, PolicyRef
from grpo_orch.tasks.completions.node_shortage import NodeShortage, Share
from grpo_orch.tasks.machine.leaving import LeaveNow
from grpo_orch.tasks.storing.heartbeat import Fenced
from grpo_orch.tasks.trl.own_generation import OwnGeneration, OwnShare

BATCH = Batch(PolicyRef("0-3", "p"), {"max_tokens": 9}, [CompletionRequest(0, [5], 1)], 60.0)


class Told:
    """What a drought is told of one part."""

    def __init__(self) -> None:
        self.made: list[Completion] = []
        self.said: list[str] = []

    def share(self, _processes: int) -> Share:
        return Share(BATCH, [])

    def take(self, made: Sequence[Completion], _took_s: float, *, training: bool) -> None:
        assert training
        self.made += made

    def halve_share(self) -> None:
        self.said.append("does not fit")

    def record_failure(self, reason: str) -> None:
        self.said.append(reason)


class Broken:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def complete(self, *_: Any) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), ["does not fit"]),
        (LeaveNow(), []),
        (RuntimeError("no kernel\nand more"), ["RuntimeError: no kernel"]),
        (AttributeError("it has no attribute 'generate'"), ["AttributeError: it has no attribute 'generate'"]),
        (KeyError("cache"), ["KeyError: 'cache'"]),
        (AssertionError(), ["AssertionError: "]),
    ],
    ids=lambda one: type(one).__name__,
)
def test_trainer_survives_any_error_of_own_generation_probe(error: Exception, said: list[str]) -> None:
    told = Told()
    share = OwnShare(cast(NodeShortage, told), cast(OwnGeneration, Broken(error)))
    share.make(Accelerator(cpu=True), training=True)
    assert (told.made, told.said) == ([], said)


def test_a_trainer_that_was_replaced_ends() -> None:
    share = OwnShare(cast(NodeShortage, Told()), cast(OwnGeneration, Broken(Fenced())))
    with pytest.raises(Fenced):
        share.make(Accelerator(cpu=True), training=True)
