"""The recipes: each is valid as it is written out, is what it says it is, and rewards what it means to."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from grpo_orch.orchestrator.cli.prepare import RECIPES, recipe_lines, write_recipe
from grpo_orch.orchestrator.config.load import load
from grpo_orch.policies.model.spec import Replicas, RunSpec
from tests.rigs.command_line import Cli

ROOT = Path(__file__).parents[3]
NOTICES = {"math-two-gpus": ["grpo.beta"]}  # it has no KL on purpose


def spec_of(recipe: str) -> RunSpec:
    return load(RECIPES / recipe / "run.yaml", lambda: 2).spec


def module(recipe: str, name: str) -> ModuleType:
    """A recipe's own; all are called the same."""
    found = importlib.util.spec_from_file_location(f"{recipe}_{name}", RECIPES / recipe / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    made = importlib.util.module_from_spec(found)
    found.loader.exec_module(made)
    return made


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("recipe", recipe_lines())
def test_written_recipe_is_valid(recipe: str, tmp_path: Path) -> None:
    written = write_recipe(recipe, tmp_path / "mine", name=None)
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == written
    loaded = load(tmp_path / "mine" / "run.yaml", lambda: 2)
    assert [notice.key for notice in loaded.notices] == NOTICES.get(recipe, [])
    assert loaded.spec.name == recipe
    other = write_recipe(recipe, tmp_path / "other", name="other")
    assert (load(tmp_path / "other" / "run.yaml", lambda: 2).spec.name, other) == ("other", written)


def test_each_has_a_line_a_page_and_a_link() -> None:
    lines = recipe_lines()
    assert lines.keys() == {path.parent.name for path in RECIPES.glob("*/run.yaml")}
    assert all(lines.values())
    for name in lines:
        assert (ROOT / "docs" / "recipes" / f"{name}.md").read_text().startswith(f"# {name}\n")
        assert (ROOT / "examples" / name / "run.yaml").samefile(RECIPES / name / "run.yaml")


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_nothing_is_overwritten(kind: str, tmp_path: Path) -> None:
    there = tmp_path / "mine"
    match kind:
        case "file":
            there.write_text("mine")
        case "folder":
            there.mkdir()
            (there / "run.yaml").write_text("mine")
        case _:
            there.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError):
        write_recipe("tiny", there, name=None)
    assert os.listdir(tmp_path) == ["mine"]
    assert kind != "folder" or (there / "run.yaml").read_text() == "mine"


def test_init_output_for_recipes_and_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grpo_orch: Cli
) -> None:
    monkeypatch.chdir(tmp_path)

    def said(*arguments: str) -> tuple[int, str]:
        code, out, err = grpo_orch("init", *arguments)
        return code, out + err

    code, listed = said("--recipe")
    assert (code, len(listed.splitlines())) == (0, len(recipe_lines()))
    code, listed = said("--recipe", "nope")
    assert (code, len(listed.splitlines())) == (2, 1 + len(recipe_lines()))
    assert said("--recipe", "tiny")[0] == 0
    for folder in ("tiny", ".", "tiny/run.yaml"):
        hint = f"{folder} already exists; name a new one: grpo-orch init --recipe tiny FOLDER\n"
        assert said("--recipe", "tiny", folder) == (2, hint)
    assert said("--recipe", "tiny", "no/such") == (2, "no/such: No such file or directory\n")
    assert said() == (
        0,
        "Wrote run.yaml, and run.schema.json for editors. Check it with: grpo-orch validate run.yaml\n",
    )
    assert said("--recipe", "tiny", "my run")[1].endswith("  cd 'my run' && grpo-orch up run.yaml\n")
    assert said("my [run].yaml")[1].endswith("validate 'my [run].yaml'\n")
    for name in ("My Run", "a\ncloud: sky", "a\n"):
        for recipe in ([], ["--recipe", "tiny"]):
            code, told = said(*recipe, "other", "--name", name)
            assert (code, "cannot be part of a machine name" in told) == (2, True)
    assert sorted(os.listdir(tmp_path)) == ["my [run].yaml", "my run", "run.schema.json", "run.yaml", "tiny"]
    assert said("run.schema.json") == (2, "run.schema.json is the name of the schema; name another file\n")
    (tmp_path / "sub" / "run.schema.json").mkdir(parents=True)
    assert said("sub/run.yaml")[1] == "sub/run.schema.json already exists and is not grpo-orch's; rename it\n"
    assert os.listdir(tmp_path / "sub") == ["run.schema.json"], "the file is not written without its schema"
    assert said("--recipe", "-o", "json")[1].startswith('{"recipes": {')


def test_overlays_of_one_recipe_change_expected_keys() -> None:
    base = spec_of("math-two-gpus")

    def over(name: str) -> RunSpec:
        """The overlay, with name and store of what it extends."""
        spec = load(RECIPES / "math-two-gpus" / f"{name}.yaml", lambda: 2).spec
        assert spec.name != base.name
        assert spec.storage != base.storage
        return replace(spec, name=base.name, storage=base.storage)

    unscaled = base.grpo | {"loss_type": "dr_grpo", "scale_rewards": "none"}
    assert over("dr-grpo") == replace(base, grpo=unscaled)
    assert over("unclipped") == replace(base, grpo=base.grpo | {"epsilon": 1e6})
    assert over("one-gpu") == replace(
        base, rollout=replace(base.rollout, replicas=Replicas(min=0, max=0), vllm={})
    )


def test_prompt_for_a_program_includes_its_test() -> None:
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
