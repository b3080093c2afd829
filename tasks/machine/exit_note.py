"""How the work on this machine ended: the trainer's exit code, and in one line why any work ended.

The exit code passes accelerate's launcher in a file, because that ends with 1 if any of its processes fails.
The reason passes the machine's own processes in another; the machine's record takes it to the controller.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from checkpoint.security.redaction import own_redactor
from policies.model import exit_codes

NOTE = "trainer_exit"
REASON = "exit_reason"
REASON_CHARS_MAX = 400
TOLD = frozenset({exit_codes.OK, exit_codes.STOPPED})  # by the launcher, too, once another process has failed


def leave_exit_code(workdir: Path, code: int, reason: str = "") -> None:
    note = workdir / NOTE
    if code not in TOLD or not note.exists():  # else it is another process's reason, for which this one ends
        leave_reason(workdir, reason)
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


def leave_reason(workdir: Path, reason: str) -> None:
    """Note why the work here ends, in one line of limited length and without secrets."""
    line = own_redactor()(" ".join(reason.split()))
    shown = line if len(line) <= REASON_CHARS_MAX else f"{line[:REASON_CHARS_MAX]}..."
    with contextlib.suppress(OSError):  # a full disk costs the line, not the exit code
        (workdir / REASON).write_text(shown, "utf-8", "backslashreplace")  # a path may be no text


def take_reason(workdir: Path) -> str:
    """Return the reason that was noted since the last call, or an empty text."""
    note = workdir / REASON
    try:
        return note.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
    finally:
        note.unlink(missing_ok=True)
