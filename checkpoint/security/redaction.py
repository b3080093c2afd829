"""Redact secrets in the output of this project's processes, including libraries and tracebacks.

A value is found verbatim, quoted as in JSON or a traceback, or URL-encoded; a value of several lines, such as a
private key, also line by line.

NAMES_ENV lists the environment variables that are secrets. The output of other programs, such as a shell script
with `set -x`, is not covered.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO, cast
from urllib.parse import quote

from grpo_orch.policies.model.node_contract import TOKEN_ENV

NAMES_ENV = "GRPO_ORCH_SECRETS"  # comma-separated names
MIN_CHARS = 8  # shorter values are not secrets, and would match parts of words
REPLACEMENT = "[secret]"


class Redactor:
    """Replaces values in texts, however they are quoted."""

    def __init__(self, values: Iterable[str]) -> None:
        forms = {form for value in values if len(value) >= MIN_CHARS for form in _forms(value)}
        # The longest first: a form may be part of another.
        self._values = sorted((form for form in forms if len(form) >= MIN_CHARS), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, REPLACEMENT)
        return text


def _forms(value: str) -> set[str]:
    """Return the forms in which a value, and each line of it, may be written."""
    plain = {value, *value.splitlines()}
    quoted = {json.dumps(text, ensure_ascii=ascii_only)[1:-1] for text in plain for ascii_only in (True, False)}
    quoted |= {repr(text)[1:-1] for text in plain} | {
        quote(text, safe=safe) for text in plain for safe in ("", "/")
    }
    return plain | quoted | {json.dumps(text)[1:-1] for text in quoted}  # a traceback within JSON is quoted twice


class _RedactedStream:
    """A text stream that redacts what is written to it."""

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
    """Return the names of the secret variables, as listed by the controller."""
    return [name for name in environment.get(NAMES_ENV, "").split(",") if name]


def own_redactor() -> Redactor:
    """Return a redactor for the secrets in this process's environment."""
    names = [*secret_names(os.environ), TOKEN_ENV]
    return Redactor(os.environ[name] for name in names if name in os.environ)


def guard_output(redact: Redactor | None = None) -> None:
    """Redact this process's stdout and stderr, by default with `own_redactor`."""
    redact = redact or own_redactor()
    sys.stdout, sys.stderr = (cast(TextIO, _RedactedStream(stream, redact)) for stream in (sys.stdout, sys.stderr))
