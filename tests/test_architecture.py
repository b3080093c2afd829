"""The tests, files and names to which docs/architecture.md and CONTRIBUTING.md point exist.

And tests use no private names of the product.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import LONG_FILES

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PAGE = ROOT / "docs" / "architecture.md"
PRODUCT = ("orchestrator", "tasks", "checkpoint", "policies")
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
# TRL calls private methods of our classes that extend its own, so their tests do too. Moto is a library.
MAY_USE_PRIVATE_NAMES = {
    "node/features/test_agents.py",
    "node/ranks/divided.py",
    "node/ranks/divided_trainer.py",
    "node/test_trl_contract.py",
    "node/trainer/test_samples.py",
    "node/trainer/test_windows_ahead.py",
    "rigs/sky/cloud.py",
}


def test_every_line_of_what_is_lost_names_an_existing_test() -> None:
    _, _, table = PAGE.read_text().partition("## What is lost when")
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    for row in rows:
        named = re.fullmatch(r"`([\w/]+\.py)::(test_\w+)`", row.strip("| ").rpartition(" | ")[2])
        assert named, row
        file, name = named.groups()
        assert re.search(rf"^ *(async )?def {name}\(", (TESTS / file).read_text(), re.MULTILINE), row


def defined_in(file: Path) -> set[str]:
    """Functions and classes of a module, and `Class.method`."""
    found = set[str]()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def test_steps_through_the_code_name_existing_parts() -> None:
    _, _, rest = PAGE.read_text().partition("## Three ways through the code")
    steps, _, _ = rest.partition("\n## ")
    rows = [line.rpartition(" | ")[2] for line in steps.splitlines() if ".py`" in line]
    assert len(rows) > 20
    for row in rows:
        file = None
        for word in re.findall(r"`([^`]+)`", row):
            if word.endswith(".py"):
                file = ROOT / word
            else:
                assert file is not None
                assert word in defined_in(file), f"{word} is not in {file}"


def test_files_that_contributing_names_exist() -> None:
    words = re.findall(r"`([\w/.-]+)`", (ROOT / "CONTRIBUTING.md").read_text())
    named = [word for word in words if "/" in word and not word.startswith(".venv")]
    assert len(named) > 20
    assert [word for word in named if not (ROOT / word).exists()] == []


def private_definitions(file: Path) -> Iterator[str]:
    """Yield names with one leading underscore that a module defines: functions, classes, variables, attributes."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def private_reads(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of attributes of other objects, imports, and names given to `setattr` and the like."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls" | "os")):
                continue
            case ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.ImportFrom(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr" | "object"), args=[*args]):
                texts = [arg.value for arg in args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
                yield from ((node.lineno, part) for text in texts for part in text.split("."))


def test_tests_use_no_private_names_of_the_product() -> None:
    files = [file for package in PRODUCT for file in (ROOT / package).rglob("*.py")]
    private = {name for file in files for name in private_definitions(file) if PRIVATE.fullmatch(name)}
    assert len(private) > 1000
    tests = [file for file in TESTS.rglob("*.py") if str(file.relative_to(TESTS)) not in MAY_USE_PRIVATE_NAMES]
    reads = [f"{file}:{line} {name}" for file in tests for line, name in private_reads(file) if name in private]
    assert reads == []


def test_test_names_have_at_most_60_characters() -> None:
    names = [name for file in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())]
    assert len(names) > 1000
    long = [name for name in names if len(name) > 60]
    assert long == []


def test_files_that_run_first_exist() -> None:
    assert [file for file in LONG_FILES if not (ROOT / file).is_file()] == []
