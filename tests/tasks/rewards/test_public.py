"""docs/api.md names what users may import, all of it and no more."""

from __future__ import annotations

import re
from pathlib import Path

from grpo_orch import rewards

PAGE = Path(__file__).parents[3] / "docs" / "api.md"


def test_api_page_names_all_of_rewards() -> None:
    table = PAGE.read_text().partition("## Import")[2].partition("## ")[0]
    names = re.findall(
        r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|"))
    )
    assert sorted(names) == sorted(rewards.__all__)
