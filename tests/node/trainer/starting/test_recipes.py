"""The recipes, three steps each, as their run.yaml says: their prompts, rewards, losses and adapters.

What cannot be here is replaced: the model by a tiny one, the hub's datasets by rows of the same columns, GPUs by
the CPU, DeepSpeed by two processes of DDP, the 8-bit optimizer by AdamW, and vLLM by the stand-in gateway.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from checkpoint.records import metrics
from orchestrator.config.load import load_spec
from policies.model.spec import RunSpec, generates_itself
from policies.model.vocabulary import PolicyVersion
from tests.node.trainer.rig import make_tiny, open_rig

EXAMPLES = Path(__file__).parents[4] / "examples"
STEPS = 3
GSM8K = {"question": "Ann has 2 pens and buys 3. How many?", "answer": "2 + 3 = 5\n#### 5"}
MATH = {"problem": "What is $3^2$?", "level": "Level 1", "type": "Algebra", "solution": "It is \\boxed{9}."}
MBPP = {"text": "Write a function that doubles.", "code": "", "test_list": ["assert double(2) == 4"]}
EXTRACT = {"title": "A note", "schema": '{"properties": {"a": {"type": "string"}}}', "text": "a is b"}
ROWS: dict[str, dict[str, Any]] = {
    "openai/gsm8k": GSM8K,
    "DigitalLearningGmbH/MATH-lighteval": MATH,
    "google-research-datasets/mbpp": MBPP,
    "paraloq/json_data_extraction": EXTRACT,
}
TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}. {% endfor %}"
SMALL = {
    "max_steps": STEPS,
    "save_steps": STEPS,
    "eval_steps": STEPS,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 8,
    "learning_rate": 1e-3,
    "use_cpu": True,
    "bf16": False,
    "optim": "adamw_torch",
    "model_init_kwargs": {"dtype": "float32"},
}
TWO_PROCESSES = {"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny(tmp_path_factory.mktemp("tiny"))
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def small(recipe: str, folder: Path, tiny: Path) -> RunSpec:
    """A recipe for this machine."""
    shutil.copytree(EXAMPLES / recipe, folder)
    whole: dict[str, Any] = yaml.safe_load((folder / "run.yaml").read_text())
    trainer, rollout = whole["trainer"], whole["rollout"]
    trainer["model"] = str(tiny / "model")
    for key in ("dataset", "eval_dataset"):
        named = trainer.get(key, [])
        for one in named if isinstance(named, list) else [named]:
            hub = one.pop("path")
            one["path"] = f"./{hub.partition('/')[2]}.jsonl"
            (folder / one["path"]).write_text((json.dumps(ROWS[hub]) + "\n") * 8)
            one.pop("name", None)
            one.pop("split", None)
    for section in (trainer, rollout):
        section.pop("resources", None)
        section.pop("setup", None)
    if "accelerate" in trainer:
        trainer["accelerate"] = TWO_PROCESSES
    settings = {key: value for key, value in SMALL.items() if key != "eval_steps" or "eval_dataset" in trainer}
    whole["grpo"] |= settings
    rollout["vllm"] = {"dtype": "float32"}
    whole |= {"storage": "./store", "cloud": "local"}
    (folder / "run.yaml").write_text(yaml.safe_dump(whole))
    return load_spec(folder / "run.yaml")


@pytest.mark.parametrize("recipe", ["qwen-32b", "math-two-gpus", "gsm8k-zero2", "llama-one-card"])
def test_three_steps(recipe: str, tiny: Path, tmp_path: Path) -> None:
    spec = small(recipe, tmp_path / recipe, tiny)
    names = [name.rpartition(".")[2] for name in spec.trainer.reward_funcs]
    with open_rig(tmp_path / "rig", tiny, ready=spec) as rig:
        assert rig.wait(rig.start_ranks(), timeout_s=300.0) == 0
        assert rig.stored()[-1] == PolicyVersion(0, STEPS)
        rows = metrics.read_metrics(rig.store)
    assert {row.step for row in rows} == {1, 2, 3}
    for name in names:
        assert any(row.values.get(f"rewards/{name}/mean") is not None for row in rows), name
    assert bool(rig.gateway.asked) != generates_itself(spec)
