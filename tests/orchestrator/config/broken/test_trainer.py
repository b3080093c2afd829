"""`trainer`: files that are not there, functions that do not fit, adapters."""

# ruff: noqa: E501  # what is printed stands here whole, to be found by searching for it

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.load import ConfigError, load_spec
from tests.generators.config_world import VALID, changed, furnish
from tests.orchestrator.config.broken.cases import DROP, Case, check, each

BROKEN: list[Case] = [
    (
        "files of the wrong kind",
        [("./model", "rewards.py"), ("dataset: prompts.jsonl", "dataset: {path: rewards.py}")],
        [
            "run.yaml:4: trainer.model: {folder}/rewards.py is a file; expected a folder",
            "run.yaml:5: trainer.dataset.path: {folder}/rewards.py is a file; expected a folder or a file that ends in .json, .jsonl, .csv, .parquet, .json.gz, .jsonl.gz, .csv.gz",
        ],
    ),
    (
        "empty names",
        [("./model", '""'), ("dataset: prompts.jsonl", 'dataset: ""')],
        [
            "run.yaml:4: trainer.model: is empty; expected a name on the hub, or a path",
            "run.yaml:5: trainer.dataset: is empty; expected a name on the hub, or a path",
        ],
    ),
    (
        "adapter keys",
        [("  reward_funcs:", "  peft: {rank: 8, r: 0, lora_alpha: x, peft_type: LORA}\n  reward_funcs:")],
        [
            "run.yaml:6: trainer.peft.rank: unknown key, not one of LoraConfig's (PEFT 0.21.2)",
            "run.yaml:6: trainer.peft.lora_alpha: expected a whole number, got 'x'",
            "run.yaml:6: trainer.peft.peft_type: cannot be set, remove it: adapters are LoRA",
            "run.yaml:6: trainer.peft.r: expected at least 1, got 0",
        ],
    ),
    (
        "reward function",
        [
            (
                "[rewards.digit_share]",
                "\n    - rewards.digit_shar\n    - reward.x\n    - digit_share\n    - rewards.no_room\n    - trl.rewards.x",
            )
        ],
        [
            'run.yaml:7: trainer.reward_funcs[0]: rewards.py defines no digit_shar; expected a function of that name; did you mean "digit_share"?',
            "run.yaml:8: trainer.reward_funcs[1]: no module reward in {folder} or the installed packages; expected a file reward.py, or its package in trainer.setup",
            "run.yaml:9: trainer.reward_funcs[2]: expected an import path, module.function, got 'digit_share'",
            "run.yaml:10: trainer.reward_funcs[3]: no_room cannot be called by TRL, which passes completion_ids too; give it a **kwargs parameter",
            'run.yaml:11: trainer.reward_funcs[4]: TRL ships no such reward function; did you mean "trl.rewards.accuracy_reward"?',
        ],
    ),
    (
        "arguments of reward functions",
        [
            (
                "reward_funcs: [rewards.digit_share]",
                "reward_funcs: [tasks.rewards.xml_format, tasks.rewards.json_schema, tasks.rewards.xml]\n"
                "  reward_args:\n    xml_format: {tag: [a]}\n    json_schema: {shema: {}}\n    xml_formats: {}\n    xml: 5",
            )
        ],
        [
            "run.yaml:6: trainer.reward_funcs[2]: __init__.py defines no xml; expected a function of that name",
            'run.yaml:8: trainer.reward_args.xml_format: xml_format takes no argument `tag`; did you mean "tags"?',
            'run.yaml:9: trainer.reward_args.json_schema: json_schema takes no argument `shema`; did you mean "schema"?',
            'run.yaml:10: trainer.reward_args.xml_formats: no such function in trainer.reward_funcs; did you mean "xml_format"?',
        ],
    ),
    (
        "no reward function",
        [("[rewards.digit_share]", "[]")],
        ["run.yaml:6: trainer.reward_funcs: expected at least one import path, as in rewards.my_reward"],
    ),
    (
        "reward models",
        [("[rewards.digit_share]", "[./judge, org/judge]")],
        [
            "run.yaml:6: trainer.reward_funcs[0]: no such file or folder: {folder}/judge; relative paths start at the folder of this file"
        ],
    ),
    (
        "turns",
        [
            (
                "  reward_funcs: [rewards.digit_share]",
                "  reward_funcs: []\n  tools: rewards.digit_shar\n  environment_factory: Ladder\n  rollout_func: rolls.out",
            ),
            ("max_completion_length: 16", "max_completion_length: 128"),
        ],
        [
            'run.yaml:7: trainer.tools: rewards.py defines no digit_shar; expected a function of that name; did you mean "digit_share"?',
            "run.yaml:8: trainer.environment_factory: expected an import path, module.function, got 'Ladder'",
            "run.yaml:9: trainer.rollout_func: no module rolls in {folder} or the installed packages; expected a file rolls.py, or its package in trainer.setup",
            "run.yaml:20: rollout.vllm.max-model-len: 256 leaves no room for another turn, whose prompt holds the turns before it; expected more than twice grpo.max_completion_length, 128",
        ],
    ),
    (
        "files that are not there",
        [("./model", "./modell"), ("dataset: prompts.jsonl", "dataset: prompt.jsonl")],
        [
            "run.yaml:4: trainer.model: no such file or folder: {folder}/modell; relative paths start at the folder of this file",
            "run.yaml:5: trainer.dataset: no such file or folder: {folder}/prompt.jsonl; relative paths start at the folder of this file",
        ],
    ),
]


@each(BROKEN)
def test_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[tuple[str, str]], lines: list[str]
) -> None:
    check(tmp_path, monkeypatch, changes, lines)


def test_machines_of_a_cloud_get_nothing_from_beside_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run_yaml = furnish(tmp_path / "run")
    (tmp_path / "model").mkdir()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1"}\n' * 8)
    elsewhere = [
        ("./model", "./a/../../model"),
        ("dataset: prompts.jsonl", "dataset: ../prompts.jsonl"),
        (DROP, ""),
    ]
    run_yaml.write_text(changed(*elsewhere))
    load_spec(run_yaml)
    run_yaml.write_text(changed(("storage: ./run", "storage: s3://bucket/run\ncloud: sky"), *elsewhere))
    with pytest.raises(ConfigError) as caught:
        load_spec(run_yaml)
    why = "is outside the folder of this file, and machines get a copy of no other; expected a path below it"
    assert str(caught.value).splitlines() == [
        f"{run_yaml}:5: trainer.model: ./a/../../model {why}",
        f"{run_yaml}:6: trainer.dataset: ../prompts.jsonl {why}",
    ]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("json.py", "Python's own `json`"),
        ("datasets.py", "the library `datasets`"),
        ("tasks/__init__.py", "grpo-orch's own `tasks`"),
    ],
)
def test_a_module_beside_the_file_that_hides_another(tmp_path: Path, made: str, says: str) -> None:
    furnish(tmp_path)
    for harmless in ("test.py", "datasets/rows.jsonl", made):
        (tmp_path / harmless).parent.mkdir(exist_ok=True)
        (tmp_path / harmless).write_text("")
    (tmp_path / "run.yaml").write_text(VALID)
    with pytest.raises(ConfigError) as caught:
        load_spec(tmp_path / "run.yaml")
    (problem,) = caught.value.problems
    assert problem.key == "trainer"
    name = made.partition("/")[0]
    assert problem.message == f"beside this file take the place of other modules: {name} ({says}); rename it"


def test_all_modules_that_hide_others_are_named_at_once(tmp_path: Path) -> None:
    furnish(tmp_path)
    for name in ("tasks.py", "checkpoint.py", "utils.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "run.yaml").write_text(VALID)
    with pytest.raises(ConfigError) as caught:
        load_spec(tmp_path / "run.yaml")
    (problem,) = caught.value.problems
    assert "checkpoint.py" in problem.message
    assert "tasks.py" in problem.message
    assert "utils.py" not in problem.message
