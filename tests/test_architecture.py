"""The tests, files and names to which docs/architecture.md and CONTRIBUTING.md point exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PAGE = ROOT / "docs" / "architecture.md"


def test_every_line_of_what_is_lost_names_a_test_that_there_is() -> None:
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


def test_steps_through_the_code_name_what_exists() -> None:
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
