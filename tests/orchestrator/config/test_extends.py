"""A run.yaml that extends another: what comes out, and where each mistake is said to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_orch.orchestrator.config.load import ConfigError, load, load_spec, load_storage
from tests.generators.config_world import VALID, furnish, schema_problems


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Here: `base/run.yaml`, which is valid, and room for others."""
    (tmp_path / "base").mkdir()
    furnish(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def over(text: str, name: str = "over.yaml", extends: str = "base/run.yaml") -> Path:
    Path(name).write_text(f"extends: {extends}\n{text}")
    return Path(name)


def said(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path)
    return str(caught.value).splitlines()


def test_mappings_merge_null_takes_away_and_the_rest_is_replaced() -> None:
    base = load_spec(Path("base/run.yaml"))
    lines = (
        "grpo: {beta: 0.1, lr_scheduler_type: null, adam_beta1: null}",
        "rehearse: {faults: [{at_step: 7, kill: trainer}]}",
        "rollout: {replicas: {min: 1, max: 3}, env: null}",
        "trainer: {eval_dataset: {path: prompts.jsonl, name: null}}",
    )
    path = over("\n".join(lines) + "\n")
    assert schema_problems(path) == []
    spec = load_spec(path)
    assert spec.grpo == {k: v for k, v in base.grpo.items() if k != "lr_scheduler_type"} | {"beta": 0.1} | {
        key: spec.grpo[key] for key in ("eval_strategy", "eval_steps")
    }
    assert base.rehearse is not None
    assert spec.rehearse is not None
    assert [fault.at_step for fault in spec.rehearse.faults] == [7]
    assert spec.rehearse.prices == base.rehearse.prices
    assert (spec.rollout.replicas.min, spec.rollout.replicas.max, spec.rollout.env) == (1, 3, {})
    assert spec.rollout.vllm == base.rollout.vllm


def test_paths_start_at_last_file_and_own_store_is_allowed(folder: Path) -> None:
    (folder / "more").mkdir()
    middle = over("name: middle\n", "more/middle.yaml", "../base/run.yaml")
    top = over("storage: ./other\n", "top.yaml", str(middle))
    spec = load_spec(top)
    assert (spec.name, spec.workdir) == ("middle", str(folder / "base"))
    assert spec.trainer.model == str(folder / "base" / "model")
    assert load_storage(top).url == spec.storage == f"file://{folder}/base/other"
    assert load_storage(middle).url == f"file://{folder}/base/run"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            "grpo:\n  bet: 1\n",
            ["over.yaml:3: grpo.bet: unknown key: not a key of GRPOConfig "],
        ),
        ("\ntrainer: {model: null}\n", ["over.yaml:3: trainer.model: missing; expected a model name"]),
        ("policies: {kl: {limit: 0}}\n", ["over.yaml:2: policies.kl.limit: expected more than 0, got 0"]),
        # What is wrong lies between the two: the batch is the extended file's.
        ("grpo:\n\n  num_generations: 7\n", ["over.yaml:4: grpo.num_generations: "]),
        ("rollout: {replicas: [2]}\nname: A\n", ["over.yaml:2: rollout.replicas: ", "over.yaml:3: name: "]),
    ],
)
def test_a_mistake_in_the_file_that_extends(text: str, lines: list[str]) -> None:
    found = said(over(text))
    assert len(found) == len(lines), found
    assert all(one.startswith(start) for one, start in zip(found, lines, strict=True)), found


def test_mistake_in_extended_file_is_reported_there() -> None:
    broken = VALID.replace("beta: 0.02", "beta: high").replace("limit: 0.5", "limit: -1")
    Path("base/run.yaml").write_text(broken)
    beta = "base/run.yaml:14: grpo.beta: expected a number, got 'high'"
    limit = "base/run.yaml:20: policies.kl.limit: expected more than 0, got -1"
    assert said(over("name: other\n")) == [beta, limit]
    assert said(over("policies: {kl: {limit: 1}}\n")) == [beta]
    assert said(over("policies: {kl: {limit: -2}}\n")) == [
        beta,
        "over.yaml:2: " + limit.split(" ", 1)[1].replace("-1", "-2"),
    ]


def test_notices_name_their_file() -> None:
    notices = [
        (one.file, one.line, one.key) for one in load(over("policies: {kl: null}\ngrpo:\n  beta: 0.0\n")).notices
    ]
    assert notices == [("over.yaml", 4, "grpo.beta")]


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ({"over.yaml": "extends: gone.yaml\n"}, "over.yaml:1: extends: no such file: gone.yaml; "),
        ({"over.yaml": "\nextends: [a]\n"}, "over.yaml:2: extends: expected the path of the run.yaml"),
        ({"over.yaml": 'extends: "a\\0"\n'}, "over.yaml:1: extends: expected the path of the run.yaml"),
        ({"over.yaml": "extends:\n"}, "over.yaml:1: extends: expected the path of the run.yaml"),
        (
            {"over.yaml": "extends: over.yaml\n"},
            "over.yaml:1: extends: circular: over.yaml is or extends this file",
        ),
        (
            {"over.yaml": "extends: b.yaml\n", "b.yaml": "name: b\nextends: ./over.yaml\n"},
            "b.yaml:2: extends: circular: over.yaml is or extends this file",
        ),
        ({"over.yaml": "extends: base\n"}, "base: cannot read the file: Is a directory"),
        ({"over.yaml": "extends: b.yaml\n", "b.yaml": "a: [\n"}, "b.yaml:2: not YAML: "),
        ({"over.yaml": "extends: b.yaml\n", "b.yaml": "- a\n"}, "b.yaml:1: the file is not a mapping"),
    ],
)
def test_invalid_extends_are_refused(files: dict[str, str], line: str) -> None:
    for name, text in files.items():
        Path(name).write_text(text)
    for read in (load, load_storage):
        with pytest.raises(ConfigError) as caught:
            read(Path("over.yaml"))
        assert str(caught.value).startswith(line), str(caught.value)


def test_each_file_of_a_chain_is_named_for_its_mistakes() -> None:
    Path("base/run.yaml").write_text(VALID.replace("beta: 0.02", "beta: 0.02\n  beta: 0.03\n  save_steps: 0"))
    middle = over("grpo:\n  logging_steps: 0\n", "middle.yaml")
    assert [
        one.partition(": expected")[0] for one in said(over("policies: {kl: {limit: 0}}\n", extends=str(middle)))
    ] == [
        "base/run.yaml:15: grpo.beta: duplicate key, first set on line 14; remove one of the two",
        "base/run.yaml:16: grpo.save_steps",
        "middle.yaml:3: grpo.logging_steps",
        "over.yaml:2: policies.kl.limit",
    ]


def test_unreadable_file_is_reported_once_and_removes_no_key() -> None:
    """Without `beta` the base file's `limit` would be wrong, too."""
    (line,) = said(over("grpo: {beta: .inf}\n"))
    assert line.startswith("over.yaml:2: grpo.beta: expected a finite number")


def test_a_circle_through_a_link_ends(folder: Path) -> None:
    (folder / "link").symlink_to(folder, target_is_directory=True)
    over("", extends="over.yaml")
    assert said(Path("link/over.yaml")) == [
        "link/over.yaml:1: extends: circular: link/over.yaml is or extends this file; remove one `extends`"
    ]
