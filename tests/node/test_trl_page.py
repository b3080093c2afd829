"""docs/trl.md names every argument of the GRPOTrainer that is installed."""

from __future__ import annotations

import inspect
import re
from pathlib import Path


def test_every_argument_is_in_one_row() -> None:
    from trl import GRPOTrainer

    page = (Path(__file__).parents[2] / "docs" / "trl.md").read_text()
    arguments = page[: page.index("## Fields")]
    named = re.findall(r"^\| `(\w+)`", arguments, re.MULTILINE)
    assert sorted([*named, "self"]) == sorted(inspect.signature(GRPOTrainer.__init__).parameters)
