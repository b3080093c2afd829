"""The trainer's exit code, past accelerate's launcher: that one ends with 1 if any of its processes fails."""

from __future__ import annotations

from pathlib import Path

NOTE = "trainer_exit"


def leave_exit_code(workdir: Path, code: int) -> None:
    (workdir / NOTE).write_text(str(code))


def take_exit_code(workdir: Path) -> int | None:
    """What a trainer's process has left since this was last asked; None where each ended without a word."""
    note = workdir / NOTE
    try:
        code = int(note.read_text())
    except (FileNotFoundError, ValueError):  # the latter: it was killed while it wrote
        return None
    finally:
        note.unlink(missing_ok=True)
    return code
