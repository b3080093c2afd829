"""A file that is not read as run.yaml is: YAML's own mistakes, keys that there are not, values of other types."""

# ruff: noqa: E501  # what is printed stands here whole, to be found by searching for it

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.load import ConfigError, load_spec
from tests.orchestrator.config.broken.cases import DROP, GRPO, Case, check, each

BROKEN: list[Case] = [
    (
        "unknown key",
        [("replicas: 2", "replica: 2"), (DROP, "")],
        [
            'run.yaml:16: rollout.replica: unknown key; expected one of deadline_s, env, max_staleness, own_generation_after_s, recovery, replicas, resources, setup, vllm; did you mean "replicas"?'
        ],
    ),
    (
        "unknown key at the top",
        [("policies:", "policy:")],
        [
            'run.yaml:19: policy: unknown key; expected one of budget, checkpoints, cloud, grpo, metrics_port, name, notify, policies, rehearse, rollout, secrets, storage, trainer; did you mean "policies"?'
        ],
    ),
    (
        "workdir is no key of the file",
        [("storage: ./run", "storage: ./run\nworkdir: /tmp")],
        [
            "run.yaml:3: workdir: unknown key; expected one of budget, checkpoints, cloud, grpo, metrics_port, name, notify, policies, rehearse, rollout, secrets, storage, trainer"
        ],
    ),
    (
        "wrong type",
        [("max_steps: 40", "max_steps: forty")],
        ["run.yaml:8: grpo.max_steps: expected a whole number, got 'forty'"],
    ),
    (
        "quoted number",
        [("learning_rate: 2e-3", 'learning_rate: "2e-3"')],
        ["run.yaml:12: grpo.learning_rate: expected a number, got '2e-3'; take the quotes away"],
    ),
    (
        "a boolean of YAML 1.1",
        [("enforce-eager: true", "enforce-eager: yes")],
        [
            "run.yaml:17: rollout.vllm.enforce-eager: expected true or false, got 'yes'; write true or false, without quotes"
        ],
    ),
    (
        "several at once, in the order of lines",
        [("name: demo", "name: Demo!"), ("limit: 0.5", "limit: 0"), ("max_steps: 40", "max_steps: 0")],
        [
            "run.yaml:1: name: 'Demo!' cannot be part of a machine's name; expected 1 to 40 lower-case letters, digits and dashes, no dash at either end",
            "run.yaml:8: grpo.max_steps: expected at least 1, or -1 to train num_train_epochs; got 0",
            "run.yaml:20: policies.kl.limit: expected more than 0, got 0",
        ],
    ),
    (
        "a name that ends with its line",
        [("name: demo", 'name: "demo\\n"')],
        [
            "run.yaml:1: name: 'demo\\n' cannot be part of a machine's name; expected 1 to 40 lower-case letters, digits and dashes, no dash at either end",
        ],
    ),
    (
        "missing keys",
        [("  model: ./model\n", ""), ("name: demo\n", "")],
        [
            "run.yaml:1: name: missing; expected a name for the run, in lower-case letters, digits and dashes",
            "run.yaml:2: trainer.model: missing; expected a model's name on the hub, or a folder",
        ],
    ),
    (
        "a key twice",
        [(GRPO, "  beta: 0.02\n  num_generations: 4")],
        ["run.yaml:15: grpo.num_generations: given twice, first on line 10; remove one of the two"],
    ),
    (
        "an item of a list",
        [("[rewards.digit_share]", "[rewards.digit_share, 5]")],
        ["run.yaml:6: trainer.reward_funcs: expected a list of texts, got a list with 5"],
    ),
    (
        "what JSON cannot hold",
        [("learning_rate: 2e-3", "learning_rate: .nan"), ("max_steps: 40", "max_steps: 99999999999999999999")],
        [
            "run.yaml:8: grpo.max_steps: expected a number of at most 64 bits, got 99999999999999999999",
            "run.yaml:12: grpo.learning_rate: expected a finite number, got .nan",
        ],
    ),
    (
        "not YAML",
        [("trainer:\n", "trainer: [\n")],
        [
            "run.yaml:5: not YAML: while parsing a flow sequence, expected ',' or ']', but got ':'",
        ],
    ),
    (
        "tags and merges",
        [("name: demo", "name: !!python/name:os.system x"), (GRPO, "  beta: 0.02\n  <<: {a: 1}")],
        [
            "run.yaml:1: name: the tag python/name:os.system is not read; expected a plain value",
            "run.yaml:15: grpo: only plain keys are read, no merge (<<); write the keys out",
        ],
    ),
]


@each(BROKEN)
def test_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[tuple[str, str]], lines: list[str]
) -> None:
    check(tmp_path, monkeypatch, changes, lines)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "run.yaml:1: the file is empty; expected name, storage, trainer, grpo; "),
        (b"- a\n", "run.yaml:1: the file is not a mapping; expected name, storage, trainer, grpo; "),
        (b"name: \xff\n", "run.yaml:1: not UTF-8; expected text, saved as UTF-8"),
        (b"a: 1\nb: \x07\n", "run.yaml:2: not YAML: a control character"),
        (b'a: "\\U99999999"\n', "run.yaml: not YAML: "),
        (
            b"a: 1\n---\nb: 2\n",
            "run.yaml:2: not YAML: expected a single document in the stream, but found another",
        ),
        (b"a: " + b"[" * 100 + b"]" * 100, "run.yaml:1: too deep or too large; "),
        (b"a: " + b"[" * 5000, "run.yaml: not YAML: "),
        (b"a: &a [*a]\n", "run.yaml:1: too deep or too large; "),
        (b'name: "\\ud800"\n', "run.yaml:1: name: not valid Unicode: half of a surrogate pair"),
        (b'name: "a\\0b"\n', "run.yaml:1: name: not for any file or program: it holds a character NUL"),
        (b'"a\\0b": 1\n', "run.yaml:1: a key that is not for any file or program: it holds a character NUL"),
        (b'"a\\nb": 1\n', "run.yaml:1: a\\nb: unknown key; "),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, line: str
) -> None:
    (tmp_path / "run.yaml").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_spec(Path("run.yaml"))
    assert any(said.startswith(line) for said in str(caught.value).splitlines()), str(caught.value)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.yaml: no such file; `grpo-orch init` writes one"):
        load_spec(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        load_spec(tmp_path)


def test_aliases_do_not_blow_up(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    (tmp_path / "run.yaml").write_text("\n".join(rows))
    with pytest.raises(ConfigError, match="too deep or too large"):
        load_spec(tmp_path / "run.yaml")
