"""With what a trainer ended, by its process and by its own word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_orch.checkpoint.security.redaction import NAMES_ENV
from grpo_orch.policies.model import exit_codes
from grpo_orch.tasks.machine.exit_note import (
    REASON,
    REASON_CHARS_MAX,
    leave_exit_code,
    take_exit_code,
    take_reason,
    trainer_exit_code,
)
from tests.rigs.locales import ASCII_LOCALE


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
    assert trainer_exit_code(tmp_path, ended) == told
    assert take_exit_code(tmp_path) is None, "it is of this attempt alone"


def test_reason_that_is_no_utf8_keeps_the_exit_code(tmp_path: Path) -> None:
    """A path may hold any bytes, and the error that names it then holds lone surrogates."""
    leave_exit_code(tmp_path, exit_codes.BAD_SPEC, "no such file: /data/\udcff")
    assert (take_exit_code(tmp_path), take_reason(tmp_path)) == (
        exit_codes.BAD_SPEC,
        "no such file: /data/\\udcff",
    )


@pytest.mark.parametrize("told_to_end", [exit_codes.OK, exit_codes.STOPPED])
def test_a_process_that_is_told_to_end_leaves_the_others_reason(tmp_path: Path, told_to_end: int) -> None:
    """As a launcher tells all once one has failed."""
    leave_exit_code(tmp_path, exit_codes.BAD_SPEC, "no such column")
    leave_exit_code(tmp_path, told_to_end, "told to end")
    assert (take_exit_code(tmp_path), take_reason(tmp_path)) == (exit_codes.BAD_SPEC, "no such column")


def test_reason_is_one_bounded_line_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMES_ENV, "HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijkl")
    leave_exit_code(tmp_path, exit_codes.BAD_SPEC, "401 for\nhf_abcdefghijkl " + "x" * 2 * REASON_CHARS_MAX)
    reason = take_reason(tmp_path)
    assert reason.startswith("401 for [secret] xxx")
    assert len(reason) == REASON_CHARS_MAX + len("...")
    assert take_reason(tmp_path) == "", "it is of this attempt alone"


def test_reason_is_whole_in_an_ascii_locale(tmp_path: Path) -> None:
    """It may quote the user's rows and file names."""
    code = rf"""
from pathlib import Path
from grpo_orch.tasks.machine.exit_note import leave_reason
leave_reason(Path({str(tmp_path)!r}), "no column yan\u0131t")
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **ASCII_LOCALE}, check=True)
    assert take_reason(tmp_path) == "no column yanıt"


def test_reason_that_cannot_be_written_leaves_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / REASON).mkdir()
    leave_exit_code(tmp_path, exit_codes.BAD_SPEC, "no such column")
    assert take_exit_code(tmp_path) == exit_codes.BAD_SPEC
