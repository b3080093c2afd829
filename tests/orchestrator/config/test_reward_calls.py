"""Reward functions in source that `validate` parses: how they are bound, and what only Python can find.

`validated.txt` has what is said of their parameters.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.generators.config_world import furnish, problem

GOOD, BAD = "def reward(completions, **kwargs): ...", "def reward(completions): ..."


def reward_problem(folder: Path) -> str:
    furnish(folder)
    return problem(folder, ("[rewards.digit_share]", "[shapes.reward]"))


@pytest.mark.parametrize(
    "source",
    [
        "for reward in (len,):\n  pass",
        "import contextlib\nwith contextlib.nullcontext(len) as reward:\n  pass",
        "if reward := len:\n  pass",
        f"match 1:\n  case 1:\n    {GOOD}",
        "for name in ('reward', 'other'):\n  globals()[name] = len",
        "exec('def reward(completions, **kwargs): ...')",
        "import sys\nsetattr(sys.modules[__name__], 'reward', len)",
        f"def make():\n  global reward\n  {GOOD}",
        f"try:\n  import fast\n  {GOOD}\nexcept ImportError:\n  {BAD}",
        f"from typing import TYPE_CHECKING\n{GOOD}\nif TYPE_CHECKING:\n  {BAD}",
        "try:\n  from fast import reward\nexcept ImportError:\n  from slow import reward",
        "from trl.rewards import think_format_reward as reward",  # which this machine need not have
        "from shapes import reward",
        f"if 1: pass\n{'elif 1: pass' + chr(10)}" * 1000 + GOOD,
        f"x = {'-' * 100_000}1\n{GOOD}",
    ],
)
def test_function_that_only_python_can_find_is_left_to_it(tmp_path: Path, source: str) -> None:
    (tmp_path / "shapes.py").write_text(source)
    assert reward_problem(tmp_path) == ""


@pytest.mark.parametrize("source", [BAD, f"if 1:\n  {BAD}\nelse:\n  {BAD}", f"from narrow import reward\n{BAD}"])
def test_function_that_fits_nowhere_is_refused(tmp_path: Path, source: str) -> None:
    (tmp_path / "narrow.py").write_text(BAD)
    (tmp_path / "shapes.py").write_text(source)
    assert "add a **kwargs parameter" in reward_problem(tmp_path)
