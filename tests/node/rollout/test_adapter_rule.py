"""What the rule for adapters takes for granted of vLLM and PEFT, against the installed ones."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
from pathlib import Path

from peft import LoraConfig

from grpo_orch.policies.weights.adapters import DEFAULT_RANK, PLAIN_KEYS, RANKS, VOCABULARY_MAX, WITHOUT_ADAPTERS


def sources() -> Path:
    """vLLM's, without importing it."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def test_these_models_vllm_serves_without_adapters() -> None:
    models = sources() / "model_executor" / "models"
    bases: dict[str, list[str]] = {}
    for path in models.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                named = [ast.unparse(one).partition("[")[0].rpartition(".")[2] for one in node.bases]
                bases.setdefault(node.name, []).extend(named)

    def adapts(name: str, seen: frozenset[str] = frozenset()) -> bool:
        if name == "SupportsLoRA":
            return True
        return any(adapts(one, seen | {name}) for one in bases.get(name, ()) if one not in seen)

    table = re.search(r"_TEXT_GENERATION_MODELS = \{(.*?)\n\}", (models / "registry.py").read_text(), re.DOTALL)
    assert table is not None
    served = re.findall(r'"(\w+)":\s*\(\s*"[\w.]+",\s*"(\w+)"', table[1])
    assert len(served) > 100
    assert {name for name, by in served if not adapts(by)} == WITHOUT_ADAPTERS


def test_ranks_and_the_vocabulary_are_vllms() -> None:
    ranks = re.search(r"MaxLoRARanks = Literal\[([\d, ]+)\]", (sources() / "config" / "lora.py").read_text())
    assert ranks is not None
    assert tuple(int(one) for one in ranks[1].split(",")) == RANKS
    head = (sources() / "lora" / "layers" / "logits_processor.py").read_text()
    assert f"vocab_size > {VOCABULARY_MAX}" in head


def test_keys_and_rank_are_pefts() -> None:
    fields = {field.name: field for field in dataclasses.fields(LoraConfig)}
    assert fields.keys() >= PLAIN_KEYS
    assert fields["r"].default == DEFAULT_RANK
