"""The terminal that commands write to, and how they stop."""

from __future__ import annotations

from rich.console import Console

# No markup: names, URLs and what a store says may have brackets.
console = Console(markup=False)
errors = Console(stderr=True, markup=False)


class Stop(Exception):
    """A command ends here with a message for the user and an exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
