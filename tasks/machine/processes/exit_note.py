"""The trainer's exit code, past accelerate's launcher: that one ends with 1 if any of its processes fails."""

from __future__ import annotations

from pathlib import Path

from policies.model import exit_codes

NOTE = "trainer_exit"
TOLD = frozenset({exit_codes.OK, exit_codes.STOPPED})  # by the launcher, too, once another process has failed


def leave_exit_code(workdir: Path, code: int) -> None:
    note = workdir / NOTE
    if code not in TOLD or not note.exists():  # else it is another process's reason, for which this one ends
        note.write_text(str(code))


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


def told_exit_code(workdir: Path, code: int) -> int:
    """The exit code of a trainer whose process ended with `code`.

    0 means that the last step is done, and only the trainer itself knows that: code of the user's, or a library in
    it, may have ended the process with the same.
    """
    noted = take_exit_code(workdir)
    if code == exit_codes.OK:
        return exit_codes.FAILED if noted is None else code
    return code if noted is None else noted
