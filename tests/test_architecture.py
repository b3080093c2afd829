"""What docs/architecture.md says is lost when something dies is held by the test that it names."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "architecture.md"


def test_every_line_of_what_is_lost_names_a_test_that_there_is() -> None:
    _, _, table = PAGE.read_text().partition("## What is lost when")
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    for row in rows:
        named = re.fullmatch(r"`([\w/]+\.py)::(test_\w+)`", row.strip("| ").rpartition(" | ")[2])
        assert named, row
        file, name = named.groups()
        assert re.search(rf"^ *(async )?def {name}\(", (TESTS / file).read_text(), re.MULTILINE), row
