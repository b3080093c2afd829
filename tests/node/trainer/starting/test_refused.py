"""A prompt that no node takes, in a real trainer: the others are trained on as if it had not been in the step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from grpo_orch.checkpoint.records import metrics
from grpo_orch.checkpoint.store import layout
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import PolicyRef
from grpo_orch.tasks.rollout.policy_folders import PolicyFolders
from tests.budget import HANG_S
from tests.node.trainer.rig import Rig, open_rig

STEPS = 3
# Sums of gradients in another order, and nothing that would blow up their last bits.
GRPO = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 1,
    "num_generations": 4,
    "shuffle_dataset": False,
    "optim": "sgd",
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "beta": 0.1,
    "max_grad_norm": 0.0,
    "save_steps": 100,
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """The tiny model's folder, with prompts that are refused."""
    folder = tmp_path_factory.mktemp("rows")
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    first = json.loads((folder / "prompts.jsonl").read_text().splitlines()[0])
    longer = {**first, "prompt": first["prompt"] * 40}
    nothing = {**first, "prompt": ""}  # no token: the tokenizer puts none before a text, as many do not
    thinks = {**first, "prompt": "1 apples:<think>"}
    for name, made in (("one", [first]), ("two", [first, longer]), ("none", [first, nothing, thinks])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return folder


def refusing(rig: Rig) -> None:
    rig.gateway.refuses = lambda prompt: len(prompt) > 100


def test_a_refused_prompt_leaves_the_step_to_the_others(rows: Path, tmp_path: Path) -> None:
    weights, logged = [], []
    for name, batches in (("one", 4), ("two", 8)):
        grpo = {**GRPO, "gradient_accumulation_steps": batches}
        with open_rig(tmp_path / name, rows, grpo=grpo, dataset=f"{name}.jsonl") as rig:
            refusing(rig)
            assert rig.wait(rig.start_trainer()) == 0
            rig.gateway.close()
            last = PolicyRef(f"0-{STEPS - 1}", layout.policy(PolicyVersion(0, STEPS - 1), by=(0, 1, 1)))
            policy = PolicyFolders(rig.store, tmp_path / f"weights-{name}").fetch(last, lambda: True)
            weights.append(load_file(policy / "model.safetensors"))
            logged.append(list(rig.rows().values()))
            assert ("prompt_refused" in rig.log().read_text()) == (name == "two")
    alone, beside = weights
    assert alone.keys() == beside.keys()
    assert max(float((alone[name] - beside[name]).abs().max()) for name in alone) < 1e-5
    for without, values in zip(*logged, strict=True):
        assert values.pop(metrics.PROMPTS_REFUSED) == 1
        assert values.pop(metrics.REFUSED_ROW) == 1
        assert values.pop(metrics.REFUSED_TOKENS) > 100
        assert values.pop(metrics.REFUSED_LIMIT) == 9
        assert values.keys() == without.keys()
        told = ("reward", "completions/", "kl", "entropy", "frac_", "sampling/sampling_logp", metrics.TOKENS)
        for key in [key for key in values if key.startswith(told)]:
            assert values[key] == pytest.approx(without[key], abs=1e-4), key


def test_a_refused_prompt_fails_the_run_where_run_yaml_says_so(rows: Path, tmp_path: Path) -> None:
    grpo = {**GRPO, "gradient_accumulation_steps": 8}
    with open_rig(tmp_path / "run", rows, grpo=grpo, dataset="two.jsonl", on_bad_prompt="fail") as rig:
        refusing(rig)
        assert rig.start_trainer().wait(HANG_S) == exit_codes.BAD_SPEC
        assert "policies.on_bad_prompt is fail: row 1 of the dataset has" in rig.last_line()


def test_a_prompt_that_is_no_input_for_the_model_leaves_the_step_to_the_others(rows: Path, tmp_path: Path) -> None:
    """One without a token, and one with a special token that was added to the tokenizer alone: it would index past
    the model's embedding."""
    model = tmp_path / "model"
    shutil.copytree(rows / "model", model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    size = len(tokenizer)
    tokenizer.add_tokens(["<think>"], special_tokens=True)
    tokenizer.save_pretrained(model)
    grpo = {**GRPO, "gradient_accumulation_steps": 12, "max_steps": 1}
    with open_rig(tmp_path / "run", rows, grpo=grpo, dataset="none.jsonl", model=str(model)) as rig:
        rig.gateway.refuses = lambda prompt: max(prompt) >= size
        rig.train()
        (row,) = rig.trained()
        assert row[metrics.PROMPTS_REFUSED] == 2
        assert row["kl"] >= 0.0
        assert row["grad_norm"] > 0.0
        assert rig.gateway.asked != []
