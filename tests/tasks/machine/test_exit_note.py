"""With what a trainer ended, by its process and by its own word."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.model import exit_codes
from tasks.machine.processes.exit_note import leave_exit_code, take_exit_code, told_exit_code


@pytest.mark.parametrize(
    ("ended", "noted", "told"),
    [
        (0, 0, exit_codes.OK),
        (0, None, exit_codes.FAILED),  # somebody's os._exit(0): the run has steps left
        (1, exit_codes.DIVERGED, exit_codes.DIVERGED),  # accelerate's launcher
        (1, None, exit_codes.FAILED),
        (137, None, 137),
    ],
)
def test_a_trainer_is_done_only_by_its_own_word(tmp_path: Path, ended: int, noted: int | None, told: int) -> None:
    if noted is not None:
        leave_exit_code(tmp_path, noted)
    assert told_exit_code(tmp_path, ended) == told
    assert take_exit_code(tmp_path) is None, "it is of this attempt alone"


@pytest.mark.parametrize("told_to_end", [exit_codes.OK, exit_codes.STOPPED])
def test_a_process_that_is_told_to_end_leaves_the_others_reason(tmp_path: Path, told_to_end: int) -> None:
    """As a launcher tells all once one has failed."""
    leave_exit_code(tmp_path, exit_codes.BAD_SPEC)
    leave_exit_code(tmp_path, told_to_end)
    assert take_exit_code(tmp_path) == exit_codes.BAD_SPEC
