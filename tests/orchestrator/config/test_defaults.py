"""What a sound run.yaml becomes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from grpo_orch.orchestrator.cli.prepare import init_text
from grpo_orch.orchestrator.config.load import ConfigError, Storage, load_spec, load_storage
from grpo_orch.orchestrator.config.load import load as load_config
from grpo_orch.policies.model.spec import (
    AgentSpec,
    CheckpointsSpec,
    Dataset,
    KlPolicy,
    OnRollback,
    Prices,
    Rehearsal,
    Rehearsed,
    RehearsedPrices,
    Replicas,
    RollbackBudget,
    RunSpec,
)
from grpo_orch.policies.sizing.training import own_generation_obstacle
from tests.generators.config_world import VALID, changed, furnish, schema_problems


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    furnish(tmp_path)
    return tmp_path


def load(folder: Path, text: str = VALID) -> RunSpec:
    (folder / "run.yaml").write_text(text)
    spec = load_spec(folder / "run.yaml")
    assert schema_problems(folder / "run.yaml") == []
    return spec


def test_the_whole_file(folder: Path) -> None:
    spec = load(folder)
    assert (spec.name, spec.cloud, spec.workdir) == ("demo", "local", str(folder))
    assert spec.storage == f"file://{folder}/run"
    assert spec.trainer.model == str(folder / "model")
    assert spec.trainer.dataset == Dataset(path=str(folder / "prompts.jsonl"))
    assert spec.trainer.reward_funcs == ("rewards.digit_share",)
    assert spec.grpo["learning_rate"] == 0.002
    assert spec.rollout.replicas == Replicas(min=2, max=2)
    assert spec.rollout.env == {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    assert spec.policies.kl == KlPolicy(limit=0.5)
    assert spec.rehearse == Rehearsal(
        faults=(
            Rehearsed(at_step=5, kill="rollout-0"),
            Rehearsed(at_step=9, preempt="rollout-1", notice_s=5.0),
            Rehearsed(at_step=12, kill="daemon", for_s=3.0),
            Rehearsed(at_step=14, no_capacity="rollouts", for_s=10.0),
        ),
        prices=RehearsedPrices(
            trainer=Prices(on_demand_usd_per_h=4.1),
            rollout=Prices(on_demand_usd_per_h=1.2, spot_usd_per_h=0.4),
        ),
    )


def test_defaults_fill_missing_keys(folder: Path) -> None:
    assert load(folder).grpo.items() >= {"save_steps": 50, "logging_steps": 1}.items()
    given = load(folder, changed(("beta: 0.02", "beta: 0.02\n  save_steps: 7\n  logging_steps: 3"))).grpo
    assert (given["save_steps"], given["logging_steps"]) == (7, 3)
    assert "bf16" not in given, "precision is TRL's to decide"


def test_default_save_steps_fall_on_window_ends(folder: Path) -> None:
    text = changed(("beta: 0.02", "beta: 0.02\n  steps_per_generation: 6\n  gradient_accumulation_steps: 4"))
    assert load(folder, text).grpo["save_steps"] == 51, "6 micro-batches, 4 a step: steps 3, 6, ... begin with one"


@pytest.mark.parametrize(
    ("written", "strategy", "steps"),
    [("", "steps", 50), ("eval_steps: 10", "steps", 10), ("eval_strategy: epoch", "epoch", None)],
)
def test_held_out_prompts_are_scored(folder: Path, written: str, strategy: str, steps: int | None) -> None:
    text = changed(
        ("  dataset: prompts.jsonl", "  dataset: prompts.jsonl\n  eval_dataset: prompts.jsonl"),
        ("  beta: 0.02", f"  beta: 0.02\n  {written}"),
    )
    grpo = load(folder, text).grpo
    assert (grpo["eval_strategy"], grpo.get("eval_steps")) == (strategy, steps)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("./run", "file://{folder}/run"),
        ("run", "file://{folder}/run"),
        ("file://./run", "file://{folder}/run"),
        ("../x/./run/", "file://{parent}/x/run"),
        ("/data/run", "file:///data/run"),
        ("file:///data/run/", "file:///data/run"),
        ("~/run", "file://{home}/run"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("gcs://bucket/a", "gcs://bucket/a"),
        ("abfss://box@account.dfs.core.windows.net/a", "abfss://box@account.dfs.core.windows.net/a"),
        ("{url: ../x/run}", "file://{parent}/x/run"),
        ("{url: s3://bucket/a/, options: {region: here}}", "s3://bucket/a"),
    ],
)
def test_storage(folder: Path, written: str, meant: str) -> None:
    expected = meant.format(folder=folder, parent=folder.parent, home=Path.home())
    assert load(folder, changed(("storage: ./run", f"storage: {written}"))).storage == expected


def test_the_store_s_options_are_texts_and_no_part_of_the_spec(folder: Path) -> None:
    options = "{secret_access_key: hunter2, account: 0123, timeout: 1e1, allow_http: True, name: 'true'}"
    spec = load(folder, changed(("storage: ./run", f"storage: {{url: s3://bucket/a, options: {options}}}")))
    assert spec.storage == "s3://bucket/a"
    assert b"hunter2" not in msgspec.json.encode(spec)
    storage = load_storage(folder / "run.yaml")
    assert storage == Storage(
        "s3://bucket/a",
        {
            "secret_access_key": "hunter2",
            "account": "0123",
            "timeout": "1e1",
            "allow_http": "true",
            "name": "true",
        },
    )
    assert "hunter2" not in repr(storage)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-6", 1e-6),
        ("1E-6", 1e-6),
        ("2.e-3", 0.002),
        (".5", 0.5),
        ("1", 1),
        ("+1000", 1000),
    ],
)
def test_numbers_are_read_as_people_write_them(folder: Path, written: str, value: float) -> None:
    assert (
        load(folder, changed(("learning_rate: 2e-3", f"learning_rate: {written}"))).grpo["learning_rate"] == value
    )


def test_checkpoints(folder: Path) -> None:
    assert load(folder).checkpoints == CheckpointsSpec(keep_last=3)
    written = "{keep_last: 1, keep_every_steps: 100, spool: /mnt/nvme, spool_gib: 40, max_behind_steps: 50}"
    spec = load(folder, VALID + f"checkpoints: {written}\n")
    assert spec.checkpoints == CheckpointsSpec(
        keep_last=1, keep_every_steps=100, spool="/mnt/nvme", spool_gib=40.0, max_behind_steps=50
    )
    assert load(folder, VALID + "checkpoints:\n").checkpoints == CheckpointsSpec(), "left empty is left out"


def test_divergence_policy_applies_by_default(folder: Path) -> None:
    assert load(folder, changed(("{limit: 0.5}", ""))).policies.kl == KlPolicy(), "left empty is left out"
    written = (
        "{action: pause, on_rollback: {beta_factor: 1, epsilon_factor: 1, learning_rate_factor: 0.1, "
        "skip_prompts: false}, budget: {total: 0, recent: 1, recent_steps: 1}}"
    )
    assert load(folder, changed(("{limit: 0.5}", written))).policies.kl == KlPolicy(
        action="pause",
        on_rollback=OnRollback(beta_factor=1.0, epsilon_factor=1.0, learning_rate_factor=0.1, skip_prompts=False),
        budget=RollbackBudget(total=0, recent=1, recent_steps=1),
    )


def test_no_and_off_are_texts(folder: Path) -> None:
    text = changed(("beta: 0.02", "beta: 0.02\n  eval_strategy: no"))
    assert load(folder, text).grpo["eval_strategy"] == "no"


def test_vllm_flags_come_out_as_vllm_spells_them(folder: Path) -> None:
    flags = "{max_model_len: 300, no-enable-prefix-caching: true, --dtype: auto, disable-log-stats: false}"
    spec = load(folder, changed((VALID[VALID.index("{dtype:") : VALID.index("  env:")].strip(), flags)))
    assert spec.rollout.vllm == {"max-model-len": 300, "enable-prefix-caching": False, "dtype": "auto"}


@pytest.mark.parametrize(
    "reward_funcs",
    [
        "rewards.digit_share",
        "[rewards.judged]",
        "[rewards.named]",
        "[trl.rewards.think_format_reward]",
        "[grpo_orch.rewards.code_tests, grpo_orch.rewards.math_reward]",
        "[grpo_orch.rewards.xml_format]\n  reward_args: {xml_format: {tags: [think, answer]}}",
        "[grpo_orch.rewards.json_schema]\n  reward_args: {json_schema: {schema: {type: object}}}",
    ],
)
def test_reward_functions_that_are_there(folder: Path, reward_funcs: str) -> None:
    assert load(folder, changed(("[rewards.digit_share]", reward_funcs))).trainer.reward_funcs


def test_a_reward_module_may_come_with_setup(folder: Path) -> None:
    text = changed(("[rewards.digit_share]", "[from_elsewhere.score]\n  setup: pip install from-elsewhere"))
    assert load(folder, text).trainer.reward_funcs == ("from_elsewhere.score",)


def test_a_path_that_setup_names_may_come_with_it(folder: Path) -> None:
    setup = ("trainer:\n", "trainer:\n  setup: test -e made || python make.py --out=made\n")
    dataset = ("dataset: prompts.jsonl", "dataset: ./made/rows.jsonl")
    loaded = load(folder, changed(setup, dataset))
    assert loaded.trainer.dataset == Dataset(path=str(folder / "made" / "rows.jsonl"))
    for other in ("./mad/rows.jsonl", "../made/rows.jsonl"):
        with pytest.raises(ConfigError, match="no such file or folder"):
            load(folder, changed(setup, ("dataset: prompts.jsonl", f"dataset: {other}")))
    with pytest.raises(ConfigError, match="no such file or folder"):
        load(folder, changed(setup, dataset, ("name: demo", "name: demo\ncloud: sky")))


def test_reward_in_a_package_is_found_without_running_it(folder: Path) -> None:
    (folder / "scores").mkdir()
    (folder / "scores" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "scores" / "exact.py").write_text(
        "if True:\n    def match(completions, **kwargs):\n        return []\n"
    )
    text = changed(("[rewards.digit_share]", "[scores.exact.match]"))
    assert load(folder, text).trainer.reward_funcs == ("scores.exact.match",)


def test_a_hub_name_stays_and_so_do_paths_on_other_machines(folder: Path) -> None:
    rehearse = VALID[VALID.index("rehearse:") :]
    text = changed(
        ("./model", "Qwen/Qwen3-0.6B"),
        ("dataset: prompts.jsonl", "dataset: {path: prompts.jsonl, split: 'train[:8]'}"),
        ("storage: ./run", "storage: s3://bucket/run\ncloud: sky"),
        (rehearse, ""),
    )
    spec = load(folder, text)
    assert spec.trainer.model == "Qwen/Qwen3-0.6B"
    assert spec.trainer.dataset == Dataset(path="prompts.jsonl", split="train[:8]")


def test_a_name_that_no_file_system_takes_is_no_path(folder: Path) -> None:
    assert load(folder, changed(("./model", "m" * 5000))).trainer.model == "m" * 5000


def test_an_alias_repeats_a_section(folder: Path) -> None:
    text = changed(
        ("  reward_funcs:", "  resources: &machine {accelerators: 'L4:1', use_spot: true}\n  reward_funcs:"),
        ("  replicas: 2", "  replicas: 2\n  resources: *machine"),
    )
    assert load(folder, text).rollout.resources == {"accelerators": "L4:1", "use_spot": True}


def test_the_template_is_valid(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(init_text("my-own"))
    loaded = load_config(tmp_path / "run.yaml")
    assert (loaded.spec.name, loaded.notices) == ("my-own", ())


def test_template_is_valid_with_all_comments_enabled(tmp_path: Path) -> None:
    lines = []
    for line in init_text("all").splitlines():
        bare = line.strip()
        if bare.startswith("# ") and bare[2:].lstrip("- {").split(":")[0].isidentifier() and ":" in bare:
            line = line.replace("# ", "", 1)
        lines.append(line)
    text = "\n".join(lines).replace("save_steps: 50", "save_steps: 50\n  eval_steps: 50", 1)
    (tmp_path / "run.yaml").write_text(text)
    spec = load_spec(tmp_path / "run.yaml")
    assert spec.rehearse is not None
    assert len(spec.rehearse.faults) == 4
    assert spec.trainer.peft is not None
    assert spec.trainer.setup
    assert spec.grpo["bf16"] is False


def test_the_store_is_found_however_the_rest_of_the_file_is(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: 7\nstorage: ./run\ntrainer: {model: ./moved-away}\nnonsense: true\n")
    assert load_storage(path) == Storage(f"file://{tmp_path}/run", {})
    for text in ("name: x\n", "storage:\n", "storage: [1]\n", "storage: s3://\n", "storage: {url: [1]}\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="storage"):
            load_storage(path)


def test_agent_in_short_and_as_command(folder: Path) -> None:
    rewards = "  reward_funcs: [rewards.digit_share]\n"
    spec = load(folder, changed((rewards, "  agent: rewards.digit_share\n")))
    assert spec.trainer.agent == AgentSpec(run="rewards.digit_share")
    assert spec.trainer.reward_funcs == ()
    assert spec.policies.on_bad_reward == "none"
    assert "agent" in own_generation_obstacle(spec)
    agent = "  agent: {run: [node, agent.js], turns: 4}\n"
    stale = ("  replicas: 2\n", "  replicas: 2\n  max_staleness: 1\n")
    fails = ("policies:\n", "policies:\n  on_bad_reward: fail\n")
    spec = load(folder, changed((rewards, agent + rewards), stale, fails))
    assert spec.trainer.agent == AgentSpec(run=("node", "agent.js"), turns=4)
    assert spec.policies.on_bad_reward == "fail"
    elsewhere = "  agent: {run: only_there.solve, python: env/bin/python}\n"  # not looked for here
    assert load(folder, changed((rewards, elsewhere))).trainer.agent == AgentSpec(
        run="only_there.solve", python="env/bin/python"
    )
