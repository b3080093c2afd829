"""Files with the trainer's exit code, and with a one-line reason why any work on this machine ended.

The trainer's processes pass the exit code in a file, because accelerate's launcher exits with 1 for any failure.
The machine's record carries the reason to the controller.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from grpo_orch.checkpoint.security.redaction import own_redactor
from grpo_orch.policies.model import exit_codes

NOTE = "trainer_exit"
REASON = "exit_reason"
REASON_CHARS_MAX = 400
# Codes of a process that the launcher stops after another process failed: the other one's note must stay.
STOPPED_CODES = frozenset({exit_codes.OK, exit_codes.STOPPED})


def leave_exit_code(workdir: Path, code: int, reason: str = "") -> None:
    """Note the exit code and reason of this trainer process."""
    note = workdir / NOTE
    if code not in STOPPED_CODES or not note.exists():
        leave_reason(workdir, reason)
        note.write_text(str(code))


def take_exit_code(workdir: Path) -> int | None:
    """Return and remove the exit code that a trainer process noted, or None."""
    note = workdir / NOTE
    try:
        code = int(note.read_text())
    except (FileNotFoundError, ValueError):  # ValueError: the process was killed while writing
        return None
    finally:
        note.unlink(missing_ok=True)
    return code


def trainer_exit_code(workdir: Path, code: int) -> int:
    """Return the noted exit code of a trainer whose process ended with `code`.

    A 0 without a note becomes FAILED: user code or a library may have ended the process before the last step.
    """
    noted = take_exit_code(workdir)
    if code == exit_codes.OK:
        return exit_codes.FAILED if noted is None else code
    return code if noted is None else noted


def leave_reason(workdir: Path, reason: str) -> None:
    """Note why the work ends, in one line of limited length and without secrets."""
    line = own_redactor()(" ".join(reason.split()))
    shown = line if len(line) <= REASON_CHARS_MAX else f"{line[:REASON_CHARS_MAX]}..."
    with contextlib.suppress(OSError):  # a full disk costs the line, not the exit code
        (workdir / REASON).write_text(shown, "utf-8", "backslashreplace")  # a path may not be UTF-8


def take_reason(workdir: Path) -> str:
    """Return and remove the noted reason; empty if there is none."""
    note = workdir / REASON
    try:
        return note.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
    finally:
        note.unlink(missing_ok=True)
