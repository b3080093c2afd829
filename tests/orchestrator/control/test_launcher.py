"""Processes of a run print any text, whatever locale the command was given in."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.control import launcher
from tests.rigs.locales import ASCII_LOCALE

PRINTS = r"print('yan\u0131t \u2713', chr(0xD83D))"


def test_process_prints_any_text_in_an_ascii_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ASCII_LOCALE.items():
        monkeypatch.setenv(name, value)
    log = tmp_path / "log"
    assert launcher._spawn(["-c", PRINTS], log).wait() == 0
    assert log.read_text("utf-8") == "yanıt ✓ \\ud83d\n"
