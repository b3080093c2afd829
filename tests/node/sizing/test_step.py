"""What is planned for training, against what TRL's own step allocates; the whole grid is `make bench-sizing`."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.rig.sizing.planned import compared
from benchmarks.rig.sizing.step import Case
from tests.generators import model_configs as known

# They are bytes that are counted, the same on every machine. Of the whole grid the worst is in docs/benchmarks.md.
WITHIN = 0.03
# Real widths and a real vocabulary; what a layer takes does not depend on how many there are.
CONFIG = {**known.QWEN_2_5_1_5B, "num_hidden_layers": 2}
NARROW = {"model_init_kwargs": {"dtype": "bfloat16"}}
LORA = {"r": 16, "target_modules": "all-linear"}


def case(name: str, grpo: dict[str, Any], peft: dict[str, Any] | None = None, **config: Any) -> Case:
    batch = {"per_device_train_batch_size": 4, "max_completion_length": 1024}
    return Case(name=name, config={**CONFIG, **config}, grpo={**batch, **grpo}, peft=peft)


@pytest.mark.parametrize(
    "one",
    [
        case("float32", {}),
        case(
            "float32, several batches, a head of its own",
            {"gradient_accumulation_steps": 4},
            tie_word_embeddings=False,
        ),
        case("bfloat16, no checkpointing", {"gradient_checkpointing": False, **NARROW}),
        case("an adapter, bfloat16", NARROW, LORA),
        case("float32, no checkpointing", {"gradient_checkpointing": False}),
        case("a mask", {"max_completion_length": 8192, **NARROW}, LORA, vocab_size=1000),
    ],
    ids=lambda one: one.name,
)
def test_planned_memory_equals_allocated_memory(one: Case) -> None:
    found = compared(one)
    assert found.ratio == pytest.approx(1, abs=WITHIN), found
