"""Which errors of the rooms below are told as one line, and the exit code that each ends with."""

from __future__ import annotations

import errno

from checkpoint.store.errors import StoreError
from orchestrator.cli.target import NoSuchRun
from orchestrator.clouds import CloudMissing
from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from orchestrator.config.load import ConfigError
from orchestrator.control.launcher import DaemonFailed, TakenByAnother
from orchestrator.home import HomeUnusable
from policies.model import exit_codes


def exit_code_of(error: Exception) -> int | None:
    """Return the exit code; None for an error that is ours."""
    match error:
        case TakenByAnother():
            return exit_codes.HELD
        case ConfigError() | NoSuchRun():
            return exit_codes.USAGE
        case OSError() if error.filename is None and error.errno in (errno.ENOSPC, errno.EIO):
            return exit_codes.FAILED  # what stdout is written to is full, or gone
        case StoreError() | CloudRefused() | CloudUnavailable() | CloudMissing() | DaemonFailed() | HomeUnusable():
            return exit_codes.FAILED
        case _:
            return None
