"""Where a log goes on a machine that has to outlive its disk: what cannot be written is lost, and no more."""

from __future__ import annotations

import contextlib
from typing import TextIO, cast


def lasting(stream: TextIO) -> TextIO:
    """The same stream for whoever writes lines; it raises no OSError, for its file may be on a full disk."""
    return cast("TextIO", _Lasting(stream))


class _Lasting:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()
