"""Steps to compare, one a line of JSON on the standard output: `python -m benchmarks.rig.sizing.cases`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.rig.sizing.planned import compared
from benchmarks.rig.sizing.step import Case
from tests.generators import model_configs as known

MODELS = {"1.5B": known.QWEN_2_5_1_5B, "7B": known.QWEN_2_5_7B, "32B": known.QWEN_2_5_32B}
ADAPTERS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "LoRA 16, attention": {"r": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "LoRA 64, all": {"r": 64, "target_modules": "all-linear"},
}
BF16 = {"model_init_kwargs": {"dtype": "bfloat16"}}
# Model, adapter, float32 or bfloat16, checkpointing, sequences x completion, accumulation.
GRID: tuple[tuple[str, str, bool, bool, tuple[int, int], int], ...] = (
    ("1.5B", "full", False, True, (8, 512), 1),
    ("1.5B", "full", False, True, (4, 2048), 8),
    ("1.5B", "full", False, False, (4, 2048), 1),
    ("1.5B", "full", True, True, (2, 8192), 4),
    ("1.5B", "full", True, False, (2, 8192), 1),
    ("1.5B", "LoRA 16, attention", False, True, (8, 512), 4),
    ("1.5B", "LoRA 16, attention", True, False, (4, 2048), 4),
    ("1.5B", "LoRA 64, all", True, True, (2, 8192), 4),
    ("7B", "full", False, True, (8, 512), 1),
    ("7B", "full", False, True, (4, 2048), 4),
    ("7B", "full", True, True, (4, 2048), 1),
    ("7B", "full", True, False, (8, 512), 4),
    ("7B", "LoRA 16, attention", True, True, (2, 8192), 4),
    ("7B", "LoRA 64, all", False, True, (4, 2048), 4),
    ("7B", "LoRA 64, all", True, False, (4, 2048), 1),
    ("32B", "full", False, True, (8, 512), 1),
    ("32B", "full", False, True, (4, 2048), 4),
    ("32B", "full", True, True, (2, 8192), 4),
    ("32B", "LoRA 16, attention", True, True, (8, 512), 8),
    ("32B", "LoRA 64, all", True, True, (8, 512), 8),
    ("32B", "LoRA 64, all", True, True, (2, 8192), 4),
    ("32B", "LoRA 64, all", False, False, (4, 2048), 1),
)
FEWER = {"num_hidden_layers": 4}
# Other kinds of models, of fewer layers: what differs is in each.
KINDS: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": known.LLAMA_3_2_1B,
    "Qwen3, 4 layers": {**known.QWEN_2_5_1_5B, **FEWER, "model_type": "qwen3", "head_dim": 128},
    "Gemma 3, 4 layers": {**known.QWEN_2_5_1_5B, **FEWER, "model_type": "gemma3_text", "head_dim": 256},
    "Phi-3, 4 layers": {**known.LLAMA_3_2_1B, **FEWER, "model_type": "phi3"},
    "Qwen3-30B-A3B, 4 layers": {**known.QWEN_3_30B_A3B, **FEWER},
    "Mistral, 4 layers, untied": {
        **known.QWEN_2_5_7B,
        **FEWER,
        "model_type": "mistral",
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
}


def cases() -> Iterator[Case]:
    """All of them, the small ones first."""
    for kind, config in KINDS.items():
        for checkpointing in (True, False):
            grpo: dict[str, Any] = {"per_device_train_batch_size": 4, "max_completion_length": 1024, **BF16}
            grpo["gradient_checkpointing"] = checkpointing
            yield Case(name=f"{kind}, full{_said(checkpointing)}", config=config, grpo=grpo)
    with_reference = {"per_device_train_batch_size": 4, "max_completion_length": 512, "beta": 0.04}
    yield Case(name="1.5B, full, with a reference", config=known.QWEN_2_5_1_5B, grpo=with_reference)
    for size, method, narrow, checkpointing, (sequences, length), batches in GRID:
        grpo = {
            "per_device_train_batch_size": sequences,
            "max_completion_length": length,
            "gradient_checkpointing": checkpointing,
            "gradient_accumulation_steps": batches,
            **(BF16 if narrow else {}),
        }
        dtype = "bfloat16" if narrow else "float32"
        name = f"{size}, {method}, {dtype}, {sequences} x {length}, {batches} a step{_said(checkpointing)}"
        yield Case(name=name, config=MODELS[size], grpo=grpo, peft=ADAPTERS[method])


def _said(checkpointing: bool) -> str:
    return "" if checkpointing else ", no checkpointing"


def main() -> None:
    warnings.simplefilter("ignore")
    for case in cases():
        print(json.dumps(asdict(compared(case))), flush=True)


if __name__ == "__main__":
    main()
