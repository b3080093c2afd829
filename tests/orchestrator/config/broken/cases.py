"""Broken files, as changes to a valid one, and what is said of them: a line a problem, with file, line and key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.config.load import ConfigError, load_spec
from tests.generators.config_world import VALID, changed, furnish

Case = tuple[str, list[tuple[str, str]], list[str]]  # what it shows, changes, the lines that are printed

DROP = VALID[VALID.index("rehearse:") :]
GRPO = "  beta: 0.02"


def each(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """A test for each case, called by what it shows, with `changes` and `lines`."""
    return pytest.mark.parametrize(("changes", "lines"), [one[1:] for one in cases], ids=[one[0] for one in cases])


def check(folder: Path, monkeypatch: pytest.MonkeyPatch, changes: list[tuple[str, str]], lines: list[str]) -> None:
    """Fail unless exactly these lines are printed; in them `{folder}` is the file's."""
    furnish(folder)
    (folder / "run.yaml").write_text(changed(*changes))
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError) as caught:
        load_spec(Path("run.yaml"))
    assert str(caught.value).splitlines() == [line.replace("{folder}", str(folder)) for line in lines]
    assert [str(problem) for problem in caught.value.problems] == str(caught.value).splitlines()
