"""Secrets reach the machines' processes, and nothing that is stored, logged or printed."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.security.redaction import NAMES_ENV, REPLACEMENT, Redactor
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.clouds.protocol import CloudRefused, LaunchOrder, Offer
from grpo_orch.orchestrator.clouds.sky.work import work_for
from grpo_orch.orchestrator.config.load import ConfigError, load
from grpo_orch.orchestrator.config.rules import looks_like_secret
from grpo_orch.orchestrator.control import daemon
from grpo_orch.orchestrator.home import (
    all_secrets,
    default_secrets,
    missing_secrets,
    run_id_of,
    secret_environment,
    secrets_for,
)
from grpo_orch.policies.model.pools import PoolOffer
from grpo_orch.policies.model.spec import Dataset, RunSpec
from grpo_orch.policies.model.vocabulary import Market, Role
from grpo_orch.policies.tick.snapshot import Machine
from tests.budget import HANG_S
from tests.generators.config_world import changed, furnish
from tests.rigs.command_line import Cli
from tests.stand_ins.world import spec

HF, WANDB, LICENCE = "hf_" + "S3cr3t" * 5, "0123456789abcdef" * 2 + "01234567", "my-licence-s3cret"
HERE = {"HF_TOKEN": HF, "WANDB_API_KEY": WANDB, "LICENCE": LICENCE, "OTHER_TOKEN": "not-for-any-machine"}


def run_spec(folder: Path | str = "", **grpo: Any) -> RunSpec:
    run = replace(spec(), grpo=grpo, workdir=str(folder), cloud="sky", secrets=("LICENCE",))
    return replace(run, trainer=replace(run.trainer, model="Qwen/Qwen3-0.6B", dataset=Dataset(path="data.jsonl")))


@pytest.mark.parametrize(
    ("grpo", "trainer", "rollout"),
    [
        ({}, ["HF_TOKEN"], ["HF_TOKEN"]),
        ({"report_to": "wandb"}, ["HF_TOKEN", "WANDB_API_KEY"], ["HF_TOKEN"]),
        ({"report_to": ["tensorboard", "wandb"]}, ["HF_TOKEN", "WANDB_API_KEY"], ["HF_TOKEN"]),
        ({"report_to": "none"}, ["HF_TOKEN"], ["HF_TOKEN"]),
    ],
)
def test_usual_secrets_are_passed_where_needed(
    tmp_path: Path, grpo: dict[str, Any], trainer: list[str], rollout: list[str]
) -> None:
    run = run_spec(tmp_path, **grpo)
    assert (default_secrets(run, Role.TRAINER), default_secrets(run, Role.ROLLOUT)) == (trainer, rollout)
    assert secrets_for(run, Role.TRAINER, HERE) == {name: HERE[name] for name in ("LICENCE", *trainer)}


def test_a_model_and_data_that_are_at_hand_need_no_token(tmp_path: Path) -> None:
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    (tmp_path / "data.jsonl").touch()
    assert (
        default_secrets(run_spec(tmp_path), Role.TRAINER)
        == default_secrets(run_spec(tmp_path), Role.ROLLOUT)
        == []
    )
    judged = replace(run_spec(tmp_path).trainer, reward_funcs=("rewards.score", "org/judge"))
    assert default_secrets(replace(run_spec(tmp_path), trainer=judged), Role.TRAINER) == ["HF_TOKEN"]
    (tmp_path / "data.jsonl").unlink()
    assert (
        default_secrets(run_spec(tmp_path), Role.TRAINER),
        default_secrets(run_spec(tmp_path), Role.ROLLOUT),
    ) == (["HF_TOKEN"], [])


def test_secrets_named_in_run_yaml_are_required_others_optional(tmp_path: Path) -> None:
    run = replace(run_spec(tmp_path), secrets=("LICENCE", "HF_TOKEN"))
    assert missing_secrets(run, HERE) == ""
    assert missing_secrets(run, {"HF_TOKEN": HF}) == "LICENCE is not set here, but listed in `secrets` of run.yaml"
    assert "LICENCE, HF_TOKEN are not set" in missing_secrets(run, {"HF_TOKEN": ""})
    assert missing_secrets(replace(run, secrets=()), {}) == ""


def test_secrets_of_any_name_reach_skypilot_separately(tmp_path: Path) -> None:
    environment = {"GRPO_ORCH_RUN": "s3://b/r", **secret_environment(all_secrets(run_spec(tmp_path), HERE))}
    order = LaunchOrder("trainer-0-i1", Role.TRAINER, Market.SPOT, 1, environment)
    work = work_for(order, run_spec(tmp_path), tmp_path / "0123" / "w.whl", None)
    assert work.secrets == {"LICENCE": LICENCE, "HF_TOKEN": HF}
    assert work.env[NAMES_ENV].split(",") == ["LICENCE", "HF_TOKEN"]
    written = repr(order) + repr(work) + repr(work.env) + work.setup + work.run
    assert not any(value in written for value in HERE.values())


class OneLaunch:
    """A cloud that is asked once, quotes the order's secrets in its refusal, and makes the daemon stop."""

    def __init__(self, stop: threading.Event) -> None:
        self.environment: dict[str, str] = {}
        self.refusing = threading.Event()
        self._asked = threading.Event()  # for its pools, without which nothing is bought
        self.stop = stop
        self._looks = 0

    def machines(self) -> dict[str, Machine]:
        self._looks += self.refusing.is_set() and self._asked.is_set()
        if self._looks > 3:
            self.stop.set()
        return {}

    def offers(self) -> list[Offer]:
        return []

    def pools(self) -> list[PoolOffer]:
        self._asked.set()
        return []

    def launch(self, order: LaunchOrder) -> None:
        if order.role is Role.TRAINER:
            self.environment = order.environment
        self.refusing.set()
        raise CloudRefused("no_capacity", f"none with {order.environment}")  # type: ignore[arg-type]

    def terminate(self, node: str) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def steered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, OneLaunch]]:
    """A daemon that has tried to launch the run's machines."""
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path / "home"))
    stop = threading.Event()
    cloud, store = OneLaunch(stop), Store(f"file://{tmp_path}/store")
    monkeypatch.setattr(daemon, "open_cloud", lambda *_: cloud)
    run = run_spec(tmp_path, report_to="wandb")
    documents.create_run(store, RunRecord(documents.SCHEMA, run_id_of("sim", store.url), 0.0, run))
    guard = threading.Timer(HANG_S, stop.set)
    guard.start()
    yield store, cloud
    guard.cancel()
    assert not any(value.encode() in data for value in HERE.values() for data in _all_bytes(tmp_path))


def _all_bytes(folder: Path) -> Iterator[bytes]:
    return (path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_launch_has_them_and_neither_store_nor_log_does(
    steered: tuple[Store, OneLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cloud = steered
    for name, value in HERE.items():
        monkeypatch.setenv(name, value)
    daemon.control_run(store, "up", cloud.stop)
    assert cloud.environment.items() >= {"HF_TOKEN": HF, "WANDB_API_KEY": WANDB, "LICENCE": LICENCE}.items()
    assert "OTHER_TOKEN" not in cloud.environment
    refusals = [str(record.events) for record in journal.read(store) if "none with" in str(record.events)]
    assert refusals
    assert all(REPLACEMENT in said and cloud.environment["GRPO_ORCH_TOKEN"] not in said for said in refusals)


def test_daemon_without_a_secret_buys_nothing_and_names_it(
    steered: tuple[Store, OneLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cloud = steered
    monkeypatch.delenv("LICENCE", raising=False)
    cloud.refusing.set()
    daemon.control_run(store, "resume", cloud.stop)
    assert cloud.environment == {}
    assert "LICENCE is not set here" in str([record.events for record in journal.read(store)])


PRINTS = """
import os, sys
from grpo_orch.checkpoint.security.redaction import guard_output
guard_output()
import structlog
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
print("token", os.environ["LICENCE"], flush=True)
structlog.get_logger().error("refused", answer=os.environ["GRPO_ORCH_TOKEN"])
raise RuntimeError(f"the hub said no to {os.environ['HF_TOKEN']}")
"""


def test_a_nodes_process_prints_none() -> None:
    given = {**HERE, "GRPO_ORCH_TOKEN": "the-run's-secret", NAMES_ENV: "LICENCE,HF_TOKEN"}
    done = subprocess.run(
        [sys.executable, "-c", PRINTS], env={**os.environ, **given}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, f"token {REPLACEMENT}\n")
    assert f"RuntimeError: the hub said no to {REPLACEMENT}" in done.stderr
    assert not any(value in done.stderr for value in (HF, LICENCE, "the-run's-secret"))


KEY = '-----BEGIN PRIVATE KEY-----\nMIIabc"def\\ghi é&/+\n-----END PRIVATE KEY-----\n'


@pytest.mark.parametrize(
    "quoted",
    [
        str,
        repr,
        json.dumps,
        functools.partial(json.dumps, ensure_ascii=False),
        lambda value: json.dumps(repr(value)),
        functools.partial(urllib.parse.quote, safe=""),
        lambda value: "\n".join(f"+ {line}" for line in value.splitlines()),
    ],
)
def test_a_value_is_blanked_however_it_is_quoted(quoted: Callable[[str], str]) -> None:
    told = Redactor([KEY])(f"the server said {quoted(KEY)} is wrong")
    assert told.startswith("the server said ")
    assert told.endswith(" is wrong")
    assert REPLACEMENT in told
    assert not any(part in told for part in ("MIIabc", "def", "ghi", "PRIVATE"))


def test_longest_secret_is_redacted_first_and_short_ones_never() -> None:
    assert Redactor(["abcdefgh", "abcdefgh-more", "yes", ""])("yes abcdefgh-more abcdefgh") == (
        f"yes {REPLACEMENT} {REPLACEMENT}"
    )


SECRETS = "storage: ./run\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            f"secrets: {HF}\n",
            "run.yaml:3: secrets: expected the name of an environment variable, as in HF_TOKEN",
        ),
        (
            f"secrets:\n  - A\n  - {WANDB}\n",
            "run.yaml:5: secrets[1]: expected the name of an environment variable",
        ),
        (f"secrets: {{HF_TOKEN: {HF}}}\n", "run.yaml:3: secrets: expected a list of strings, got a mapping"),
        ("secrets: [HF_TOKEN, A, HF_TOKEN]\n", "run.yaml:3: secrets[2]: HF_TOKEN is listed twice"),
        ("secrets: [GRPO_ORCH_TOKEN]\n", "run.yaml:3: secrets[0]: GRPO_ORCH_TOKEN is set by grpo-orch; remove it"),
        ("secrets: [OMP_NUM_THREADS]\n", "run.yaml:3: secrets[0]: OMP_NUM_THREADS is also set in rollout.env"),
        ("secrets: [a-b]\n", "run.yaml:3: secrets[0]: expected the name of an environment variable"),
        ("secrets: [1]\n", "run.yaml:3: secrets: expected a list of strings"),
    ],
)
def test_invalid_secret_list_is_refused_without_quoting_it(tmp_path: Path, text: str, problem: str) -> None:
    run_yaml = furnish(tmp_path)
    run_yaml.write_text(changed((SECRETS, SECRETS + text)))
    with pytest.raises(ConfigError) as caught:
        load(run_yaml)
    assert problem in str(caught.value)
    assert not any(value in str(caught.value) for value in HERE.values())


def test_one_text_is_a_list_of_one_secret(tmp_path: Path) -> None:
    run_yaml = furnish(tmp_path)
    run_yaml.write_text(changed((SECRETS, SECRETS + "secrets: HF_TOKEN\n")))
    assert load(run_yaml).spec.secrets == ("HF_TOKEN",)


def test_possible_secret_in_env_gives_notice_without_its_value(tmp_path: Path) -> None:
    run_yaml = furnish(tmp_path)
    env = "env: {VLLM_CPU_OMP_THREADS_BIND: nobind, OMP_NUM_THREADS: 1}"
    given = f"env: {{TOKENIZERS_PARALLELISM: false, JUDGE_API_KEY: abc, OTHER: {HF}}}\n  setup: login {HF}"
    run_yaml.write_text(changed((env, given)))
    notices = [str(one).removeprefix(f"{tmp_path}/") for one in load(run_yaml).notices]
    assert [one.split(": ")[:2] for one in notices] == [
        ["run.yaml:18", "rollout.env.JUDGE_API_KEY"],
        ["run.yaml:18", "rollout.env.OTHER"],
        ["run.yaml:19", "rollout.setup"],
    ]
    assert all("list it under `secrets:`" in one and HF not in one for one in notices)


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("X", HF, True),
        ("X", "sk-proj-abcdefghijklmnop", True),
        ("X", WANDB, True),
        ("X", "AKIAIOSFODNN7EXAMPLE", True),
        ("X", "ghp_" + "a" * 36, True),
        ("HF_TOKEN", "anything", True),
        ("aws_secret_access_key", "anything", True),
        ("DB_PASSWORD", "anything", True),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("MAX_TOKEN_LENGTH", "4096", False),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "token", False),
        ("USE_KEY", "true", False),
        ("SSL_KEY", "/etc/key.pem", False),
        ("MODEL", "hf_hub", False),
        ("COMMIT", "0123456789abcdef", False),
        ("VLLM_LOGGING_LEVEL", "WARNING", False),
    ],
)
def test_secret_detection_by_name_and_value(name: str, value: str, *, secret: bool) -> None:
    assert looks_like_secret(name, value) is secret


def test_up_and_resume_name_the_missing_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grpo_orch: Cli
) -> None:
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LICENCE", raising=False)
    run_yaml = furnish(tmp_path)
    run_yaml.write_text(changed((SECRETS, SECRETS + "secrets: [LICENCE]\n")))
    record = RunRecord(documents.SCHEMA, "demo", 0.0, load(run_yaml).spec)
    for command in ("up", "resume"):
        told = grpo_orch(command, str(run_yaml), *(["--yes"] if command == "up" else []))
        assert told.code == 2
        problem = "LICENCE is not set here, but listed in `secrets` of run.yaml"
        assert told.line == f"{problem}; export it or remove it from that list"
        if command == "up":
            assert not (tmp_path / "run" / "run.json").exists()
            documents.create_run(Store((tmp_path / "run").as_uri()), record)
