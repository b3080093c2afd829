"""The terminal that commands write to, and how they stop."""

from __future__ import annotations

from rich.console import Console

console = Console()
errors = Console(stderr=True)


class Stop(Exception):
    """A command ends here with a message for the user and an exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
