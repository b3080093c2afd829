"""What the recipes' tiny twins keep of their recipes: all that GRPO learns by, but for rates and sizes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from grpo_orch.orchestrator.cli import prepare as write
from grpo_orch.orchestrator.config.load import load_spec
from grpo_orch.policies.model.spec import RunSpec, datasets_of, generates_itself

TWINS = Path(__file__).parents[3] / "examples" / "twins"
RECIPES = sorted(path.stem for path in TWINS.glob("*.yaml") if path.stem != "alone")
# What a model of 0.1 M parameters on a CPU needs otherwise.
CHANGED = {
    *("max_steps", "save_steps", "eval_steps", "warmup_steps", "learning_rate", "max_completion_length"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("use_cpu", "bf16", "optim", "gradient_checkpointing", "model_init_kwargs"),
}
# Of all their datasets.
COLUMNS = ("question", "answer", "problem", "solution", "text", "schema", "test_list")
ROWS = 512


def twin(recipe: str, folder: Path, file: str) -> RunSpec:
    """As `make.py` writes it, without what is in the model, and with rows alike."""
    shutil.copytree(write.RECIPES / recipe, folder)
    text = (TWINS / f"{recipe}.yaml").read_text()
    (folder / "tiny.yaml").write_text(text)
    shutil.copyfile(TWINS / "alone.yaml", folder / "alone.yaml")
    (folder / "model").mkdir()
    row = json.dumps(dict.fromkeys(COLUMNS, "1"))
    for name in re.findall(r"\./(\w+\.jsonl)", text):
        (folder / name).write_text(f"{row}\n" * ROWS)
    return load_spec(folder / file)


def test_each_recipe_has_one() -> None:
    assert (
        sorted(path.parent.name for path in write.RECIPES.glob("*/run.yaml") if path.parent.name != "tiny")
        == RECIPES
    )


@pytest.mark.parametrize("file", ["tiny.yaml", "alone.yaml"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_it_keeps(recipe: str, file: str, tmp_path: Path) -> None:
    whole, small = load_spec(write.RECIPES / recipe / "run.yaml"), twin(recipe, tmp_path / "twin", file)
    keys = whole.grpo.keys() | small.grpo.keys()
    assert {key for key in keys if whole.grpo.get(key) != small.grpo.get(key)} <= CHANGED
    for key in ("reward_funcs", "reward_args", "peft"):
        assert getattr(small.trainer, key) == getattr(whole.trainer, key)
    both = [[(one.prompt, one.weight) for one in datasets_of(spec.trainer.dataset)] for spec in (whole, small)]
    assert both[0] == both[1]
    assert generates_itself(small) == (generates_itself(whole) or file == "alone.yaml")
