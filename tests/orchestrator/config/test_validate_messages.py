"""What `validate` says: `validated.txt` has changes of the valid file, and each line that is printed of them.

A line that is not indented begins a case: its name, or its first change. `!` is a problem, `~` a notice of a file
that can be run. Changes are `OLD => NEW`, or `SECTION + LINE` for one more line in a section; `⏎` is a line's end.
`FILE << N LINE` adds a line to another file, N times. `= NAME: JSON` is (a part of) a value that is read.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from grpo_orch.orchestrator.config.load import ConfigError, load, load_spec, load_storage
from grpo_orch.policies.model.gpus import DriverFailed
from grpo_orch.policies.model.spec import RunSpec
from tests.generators.config_world import (
    FUNCTIONS,
    NO_REHEARSAL,
    PROMPTS,
    SKY,
    changed,
    furnish,
    schema_problems,
)

ADDED = {
    "grpo": "  beta: 0.02",
    "rollout": "  replicas: 2",
    "policies": "policies:",
    "trainer": "dataset: prompts.jsonl",
}


class Case(NamedTuple):
    name: str
    changes: list[tuple[str, str]]
    said: list[str]
    gpus: int = 0  # of this machine
    files: dict[str, str] = {}  # noqa: RUF012  # a tuple's default
    read: tuple[str, ...] = ()


def cases() -> Iterator[Case]:
    family = ""
    for block in Path(__file__).with_name("validated.txt").read_text().replace("\n    ", "\0").splitlines():
        first, *more = block.split("\0")
        if first.startswith("== "):
            family = first.removeprefix("== ")
            continue
        lines = [line.replace("⏎", "\n").replace("∅", "") for line in (first, *more)]
        said = [line for line in lines if line.startswith(("! ", "~ "))]
        gpus = sum(int(line.removeprefix("gpus ")) for line in lines if line.startswith("gpus "))
        changes = [change for line in lines for change in changes_of(line)]
        read = tuple(line.removeprefix("= ") for line in lines if line.startswith("= "))
        yield Case(f"{family}: {first}", changes, said, gpus, files_of(lines), read)


def files_of(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, is_file, text in (line.partition(" << ") for line in lines):
        if is_file:
            count, _, line = text.partition(" ") if text.split(" ")[0].isdigit() else ("1", "", text)
            found[name] = found.get(name, "") + int(count) * f"{line}\n"
    return found


def changes_of(line: str) -> list[tuple[str, str]]:
    if line.startswith(("! ", "~ ", "= ")) or " << " in line:
        return []
    if line in ("sky", "no rehearsal"):
        return [NO_REHEARSAL, *([SKY] if line == "sky" else [])]
    old, is_change, new = line.partition(" => ")
    if is_change:
        return [(old, new)]
    section, is_added, added = line.partition(" + ")
    return [(ADDED[section], f"{ADDED[section]}\n  {added}")] if is_added else []


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_each_change_is_reported_with_line_and_key(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    furnish(tmp_path)
    (tmp_path / "prompts.py").write_text(PROMPTS)
    (tmp_path / "math.jsonl.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "my.py").write_text(FUNCTIONS)
    for name, content in case.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "run.yaml").write_text(changed(*case.changes))
    monkeypatch.chdir(tmp_path)
    try:
        loaded = load(Path("run.yaml"), lambda: case.gpus)
        said = [f"~ {notice}" for notice in loaded.notices]
        assert schema_problems(Path("run.yaml")) == []
        check_read(case, loaded.spec, tmp_path)
    except ConfigError as error:
        said = [f"! {line}" for line in str(error).splitlines()]
        assert len(error.problems) == len(said)  # noqa: PT017  # either is an outcome
    lines = [line.replace("run.yaml:", "", 1).replace(str(tmp_path), "{folder}") for line in said]
    told = [line.replace(str(tmp_path.parent), "{parent}") for line in lines]
    assert told == case.said


def check_read(case: Case, spec: RunSpec, folder: Path) -> None:
    """Compare each value that the case names; of a mapping, the keys that it names."""
    for line in case.read:
        name, _, value = line.partition(": ")
        places = {"{folder}": folder, "{parent}": folder.parent, "{home}": Path.home()}
        for word, place in places.items():
            value = value.replace(word, str(place))
        found = msgspec.json.decode(msgspec.json.encode(spec))
        for part in name.split("."):
            found = found.get(part)
        assert contains(found, json.loads(value)), (name, found)


def contains(found: Any, part: Any) -> bool:
    if isinstance(part, list):
        return len(found) == len(part) and all(map(contains, found, part))
    if isinstance(part, dict):
        return all(contains(found.get(key), value) for key, value in part.items())
    return bool(found == part)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "run.yaml:1: the file is empty; expected name, storage, trainer, grpo; "),
        (b"- a\n", "run.yaml:1: the file is not a mapping; expected name, storage, trainer, grpo; "),
        (b"name: \xff\n", "run.yaml:1: not UTF-8; expected text, saved as UTF-8"),
        (b"a: 1\nb: \x07\n", "run.yaml:2: not YAML: contains a control character"),
        (b'a: "\\U99999999"\n', "run.yaml: not YAML: "),
        (
            b"a: 1\n---\nb: 2\n",
            "run.yaml:2: not YAML: expected a single document in the stream, but found another",
        ),
        (b"a: " + b"[" * 100 + b"]" * 100, "run.yaml:1: too deep or too large; "),
        (b"a: " + b"[" * 5000, "run.yaml: not YAML: "),
        (b"a: &a [*a]\n", "run.yaml:1: too deep or too large; "),
        (
            b'name: "\\ud800"\n',
            "run.yaml:1: name: contains half of a surrogate pair, which is not valid Unicode; remove it",
        ),
        (b'name: "a\\0b"\n', "run.yaml:1: name: contains a NUL character; remove it"),
        (b'"a\\0b": 1\n', "run.yaml:1: invalid key: it contains a NUL character; remove it"),
        (b'"a\\nb": 1\n', "run.yaml:1: a\\nb: unknown key; "),
        (None, "run.yaml: no such file; `grpo-orch init` writes one"),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("run.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_spec(Path("run.yaml"))
    assert any(said.startswith(line) for said in str(caught.value).splitlines()), str(caught.value)


def test_aliases_do_not_blow_up(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    (tmp_path / "run.yaml").write_text("\n".join(rows))
    with pytest.raises(ConfigError, match="too deep or too large"):
        load_spec(tmp_path / "run.yaml")


@pytest.mark.parametrize("asks", [True, False])
def test_failing_driver_is_reported_where_it_matters(asks: bool, tmp_path: Path) -> None:
    def fails() -> int:
        raise DriverFailed("nvidia-smi ends with exit code 9: no driver")

    run_yaml = furnish(tmp_path)
    resources = "replicas: 1\n  resources: {accelerators: 'L4:4'}" if asks else "replicas: 1"
    run_yaml.write_text(changed(("replicas: 2", resources), NO_REHEARSAL))
    if asks:
        where = r"17: rollout\.resources\.accelerators: nvidia-smi ends with exit code 9"
        with pytest.raises(ConfigError, match=where):
            load(run_yaml, fails)
        return
    said = [one.message for one in load(run_yaml, fails).notices]
    assert "nvidia-smi ends with exit code 9: no driver; the run uses no GPUs of this machine" in said


SECRETS = (
    "hunter2", "[hunter2]", "{access_key: [hunter2]}", "{access_key: hunter2, access_key: other}",
    "{access_key: !!int hunter2}", "{access_key: !hunter2 x}", "{access_key: !hunter2!x y}",
    "{access_key: *hunter2}", "{access_key: &hunter2 x, other: &hunter2 y}", "{access_key: 'hunter2",
    '{access_key: "hunter2\\ud800"}', "!!float hunter2",
)  # fmt: skip


@pytest.mark.parametrize("options", SECRETS)
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


def test_cloud_machines_get_nothing_from_outside_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run_yaml = furnish(tmp_path / "run")
    (tmp_path / "model").mkdir()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1"}\n' * 8)
    elsewhere = [("./model", "./a/../../model"), ("dataset: prompts.jsonl", "dataset: [a/b, ../prompts.jsonl]")]
    run_yaml.write_text(changed(NO_REHEARSAL, *elsewhere))
    load_spec(run_yaml)
    run_yaml.write_text(changed(NO_REHEARSAL, SKY, *elsewhere))
    with pytest.raises(ConfigError) as caught:
        load_spec(run_yaml)
    why = "is outside the folder of this file, the only one that machines get a copy of; expected a path below it"
    assert str(caught.value).splitlines() == [
        f"{run_yaml}:5: trainer.model: ./a/../../model {why}",
        f"{run_yaml}:6: trainer.dataset[1]: ../prompts.jsonl {why}",
    ]
