"""`storage`, `checkpoints` and `cloud`: where the run is kept, and how much of it."""

# ruff: noqa: E501  # what is printed stands here whole, to be found by searching for it

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.load import ConfigError, load_spec, load_storage
from tests.generators.config_world import changed, furnish
from tests.orchestrator.config.broken.cases import DROP, Case, check, each

BROKEN: list[Case] = [
    (
        "a store's URL without its slashes",
        [("storage: ./run", "storage: s3:/bucket/run")],
        ["run.yaml:2: storage: neither a folder nor a URL; expected s3:// and what follows"],
    ),
    (
        "a store's URL without its scheme",
        [("storage: ./run", "storage: //bucket/run")],
        ["run.yaml:2: storage: nothing stands before //; expected a folder or a URL, as in s3://bucket/my-run"],
    ),
    (
        "no URL at all before the slashes",
        [("storage: ./run", "storage: my bucket://run")],
        [
            "run.yaml:2: storage: what stands before :// is no URL scheme; expected a folder or a URL, as in s3://bucket/my-run"
        ],
    ),
    (
        "a store that ends with its process",
        [("storage: ./run", "storage:\n  url: memory://run")],
        [
            "run.yaml:3: storage.url: memory:// ends with its process; expected a folder or a URL, as in s3://bucket/my-run"
        ],
    ),
    (
        "a secret in the URL",
        [("storage: ./run", "storage: sftp://user:hunter2@host/run")],
        [
            "run.yaml:2: storage: a password in the URL would be stored with the run; expected it among storage.options"
        ],
    ),
    (
        "storage as a list",
        [("storage: ./run", "storage: [s3://bucket/run]")],
        [
            "run.yaml:2: storage: expected a folder or a URL, as in s3://bucket/my-run, or a mapping with the keys url, options"
        ],
    ),
    (
        "storage as a mapping",
        [
            (
                "storage: ./run",
                "storage:\n  ulr: s3://bucket/run\n  options:\n    region: [eu-west-1]\n    endpoint:",
            )
        ],
        [
            "run.yaml:2: storage.url: missing; expected a folder or a URL, as in s3://bucket/my-run",
            'run.yaml:3: storage.ulr: unknown key; expected one of options, url; did you mean "url"?',
            "run.yaml:5: storage.options.region: expected text, a number, true or false",
            "run.yaml:6: storage.options.endpoint: expected text, a number, true or false",
        ],
    ),
    (
        "checkpoints",
        [
            (
                "policies:\n",
                "checkpoints:\n  keep_lats: 2\n  keep_last: 0\n  keep_every_steps: 0\n  spool: shm\n  spool_gib: 0\n"
                "  max_behind_steps: 49\npolicies:\n",
            )
        ],
        [
            'run.yaml:20: checkpoints.keep_lats: unknown key; expected one of keep_every_steps, keep_last, keep_rollouts_every_steps, max_behind_steps, spool, spool_gib; did you mean "keep_last"?',
            "run.yaml:21: checkpoints.keep_last: expected at least 1, got 0",
            "run.yaml:22: checkpoints.keep_every_steps: expected at least 1, got 0",
            "run.yaml:23: checkpoints.spool: expected a whole path, for it is a folder of the trainer's machine; got 'shm'",
            "run.yaml:24: checkpoints.spool_gib: expected more than 0, got 0",
            "run.yaml:25: checkpoints.max_behind_steps: less than grpo.save_steps, 50: training would wait for what is not due yet; expected at least that, got 49",
        ],
    ),
    (
        "checkpoints of another type",
        [("policies:\n", "checkpoints: {keep_last: '3', spool_gib: all}\npolicies:\n")],
        [
            "run.yaml:19: checkpoints.keep_last: expected a whole number, got '3'; take the quotes away",
            "run.yaml:19: checkpoints.spool_gib: expected a number or null, got 'all'",
        ],
    ),
    (
        "a folder as the store of many machines, and a rehearsal there",
        [("storage: ./run", "storage: ./run\ncloud: sky")],
        [
            "run.yaml:2: storage: a folder is on this machine only; with cloud: sky, expected s3://, gs:// or az://",
            "run.yaml:22: rehearse: faults are rehearsed on the local cloud alone; set cloud: local or remove this section",
        ],
    ),
    (
        "cloud",
        [("storage: ./run", "storage: ./run\ncloud: aws"), (DROP, "")],
        ["run.yaml:3: cloud: expected one of local, sky, got 'aws'"],
    ),
]


@each(BROKEN)
def test_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[tuple[str, str]], lines: list[str]
) -> None:
    check(tmp_path, monkeypatch, changes, lines)


@pytest.mark.parametrize(
    "options",
    [
        "hunter2",
        "[hunter2]",
        "{access_key: [hunter2]}",
        "{access_key: hunter2, access_key: other}",
        "{access_key: !!int hunter2}",
        "{access_key: !hunter2 x}",
        "{access_key: !hunter2!x y}",
        "{access_key: *hunter2}",
        "{access_key: &hunter2 x, other: &hunter2 y}",
        "{access_key: 'hunter2",
        '{access_key: "hunter2\\ud800"}',
        "!!float hunter2",
    ],
)
def test_no_message_quotes_a_secret(tmp_path: Path, options: str) -> None:
    furnish(tmp_path)
    storage = f"storage:\n  url: s3://bucket/run\n  options: {options}\n"
    for text in (changed(("storage: ./run\n", storage)), storage):
        (tmp_path / "run.yaml").write_text(text)
        for read in (load_spec, load_storage):
            with pytest.raises(ConfigError) as caught:
                read(tmp_path / "run.yaml")
            assert "storage.options" in str(caught.value) or "not YAML" in str(caught.value)
            assert "hunter2" not in str(caught.value)
