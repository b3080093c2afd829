"""The recipes of examples/: each is valid as it stands, is what it says it is, and rewards what it means to."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from orchestrator.config.load import load
from policies.model.spec import Dataset, RunSpec, datasets_of, generates_itself

EXAMPLES = Path(__file__).parents[3] / "examples"
NOTICES = {"math-two-gpus": ["grpo.beta"]}  # it has no KL on purpose


def recipes() -> list[str]:
    """All examples but the demo's, whose model is made first."""
    return sorted(path.parent.name for path in EXAMPLES.glob("*/run.yaml") if path.parent.name != "tiny")


def spec_of(recipe: str) -> RunSpec:
    return load(EXAMPLES / recipe / "run.yaml", lambda: 2).spec


def module(recipe: str, name: str) -> ModuleType:
    """A recipe's own; all are called the same."""
    found = importlib.util.spec_from_file_location(f"{recipe}_{name}", EXAMPLES / recipe / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    made = importlib.util.module_from_spec(found)
    found.loader.exec_module(made)
    return made


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("recipe", recipes())
def test_it_is_valid_as_it_stands(recipe: str) -> None:
    loaded = load(EXAMPLES / recipe / "run.yaml", lambda: 2)
    assert [notice.key for notice in loaded.notices] == NOTICES.get(recipe, [])
    assert loaded.spec.name == recipe


def test_they_are_the_published_ones() -> None:
    large, two, zero, card = (
        spec_of(name) for name in ("qwen-32b", "math-two-gpus", "gsm8k-zero2", "llama-one-card")
    )
    asked = {"num_generations": 8, "temperature": 0.8, "max_completion_length": 512, "learning_rate": 5e-7}
    assert large.grpo.items() >= (asked | {"beta": 0.04, "epsilon": 0.2, "save_steps": 50}).items()
    assert large.rollout.vllm == {"gpu-memory-utilization": 0.85, "max-model-len": 4096}
    batch = two.grpo["per_device_train_batch_size"] * two.grpo["gradient_accumulation_steps"]
    assert batch == 16 * two.grpo["num_generations"] == 16 * 8
    assert (two.grpo["max_steps"], two.grpo["learning_rate"]) == (200, 1e-5)
    assert zero.trainer.accelerate is not None
    assert zero.trainer.accelerate["deepspeed_config"]["zero_stage"] == 2
    assert zero.trainer.peft is not None
    assert zero.trainer.peft["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert zero.grpo["reward_weights"] == [1.0, 0.1, 0.05]
    assert card.grpo.items() >= {"optim": "adamw_8bit", "lr_scheduler_type": "cosine"}.items()
    assert card.grpo["reward_weights"] == [0.5, 2.0]
    assert [generates_itself(spec) for spec in (large, two, zero, card)] == [False, False, False, True]


def test_what_is_asked_of_a_program() -> None:
    tests = ["assert double(2) == 4"]
    asked = module("qwen-32b", "prompts").of_mbpp({"text": "Double it.", "test_list": tests})
    assert asked[-1] == {"role": "user", "content": f"Double it.\nIt should pass this test: {tests[0]}"}


def test_the_reward_of_an_answer_in_its_place() -> None:
    rewards = module("math-two-gpus", "rewards")
    texts = [
        "3 by 3 is 9. </think> <answer>It is \\boxed{\\frac{18}{2}}.</answer>",
        "3 by 3 is 9. </think> <answer>It is \\boxed{9}.</answer>",
        "3 by 3 is 9. </think> \\boxed{\\frac{18}{2}}",
        "<answer>\\boxed{\\frac{18}{2}}</answer>",
        "so </think> <answer>\\boxed{\\frac{18}{2</answer>",
    ]
    assert rewards.right_in_form(texts, solution=["It is $\\boxed{\\frac{18} {2}}$."] * 5) == [1, 0, 0, 0, 0]
    assert rewards.right_in_form(["x"], solution=["nothing boxed"]) == [0]


def test_a_shaped_reward() -> None:
    rewards = module("gsm8k-zero2", "rewards")
    texts = ["2 + 3 = 5\n#### 5", "2 + 3 = 6\n#### 6", "5", "#### 5 or 6", "x" * 800 + "\n#### 5"]
    chats = [*map(chat, texts)]
    assert rewards.in_form(chats) == [1, 1, 0, 0, 1]
    assert [round(one, 2) for one in rewards.short(chats)] == [1, 1, 1, 1, 0.49]


def test_the_shares_of_the_32b_recipe() -> None:
    sets: tuple[Dataset, ...] = datasets_of(spec_of("qwen-32b").trainer.dataset)
    assert [one.weight for one in sets] == [2, 1, 1]
