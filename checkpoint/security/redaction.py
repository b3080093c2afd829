"""Blanks secrets in what this project prints, also through libraries and in tracebacks.

A value is found as it is, quoted as in JSON or a traceback, or URL-encoded; one of several lines, such as a
private key, also line by line.

NAMES_ENV tells a node which environment variables are secrets. The output of other programs (a shell script with
`set -x`) is not covered.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO, cast
from urllib.parse import quote

from policies.model.node_contract import TOKEN_ENV

NAMES_ENV = "GRPO_ORCH_SECRETS"  # names, with commas between them
LEAST_CHARS = 8  # what is shorter is no secret, and stands in many words
BLANK = "[secret]"


class Redactor:
    """Blanks values in texts, however they are quoted there."""

    def __init__(self, values: Iterable[str]) -> None:
        shown = {form for value in values if len(value) >= LEAST_CHARS for form in _forms(value)}
        # The longest first: one may be a part of another.
        self._values = sorted((one for one in shown if len(one) >= LEAST_CHARS), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, BLANK)
        return text


def _forms(value: str) -> set[str]:
    """How a value, and each line of it, may be written."""
    plain = {value, *value.splitlines()}
    quoted = {json.dumps(one, ensure_ascii=ascii_only)[1:-1] for one in plain for ascii_only in (True, False)}
    quoted |= {repr(one)[1:-1] for one in plain} | {quote(one, safe=safe) for one in plain for safe in ("", "/")}
    return plain | quoted | {json.dumps(one)[1:-1] for one in quoted}  # a traceback within JSON quotes it twice


class _Guarded:
    """A text stream that blanks what is written to it."""

    def __init__(self, stream: TextIO, redact: Redactor) -> None:
        self._stream = stream
        self._redact = redact

    def write(self, text: str) -> int:
        self._stream.write(self._redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def secret_names(environment: Mapping[str, str]) -> list[str]:
    """Which variables are secrets, as the controller named them."""
    return [name for name in environment.get(NAMES_ENV, "").split(",") if name]


def own_redactor() -> Redactor:
    """Return what blanks the secrets in this process's environment."""
    names = [*secret_names(os.environ), TOKEN_ENV]
    return Redactor(os.environ[name] for name in names if name in os.environ)


def guard_output(redact: Redactor | None = None) -> None:
    """Make this process print no secret from now on; without `redact`, none of its node's."""
    redact = redact or own_redactor()
    sys.stdout, sys.stderr = (cast(TextIO, _Guarded(stream, redact)) for stream in (sys.stdout, sys.stderr))
