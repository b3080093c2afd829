"""What is wrong with a run.yaml, one line each, and where to look.

Every check reports to one `Findings` and goes on, so that a user sees all problems of a file at once. Only
`load` and its like raise, and only ConfigError.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

KeyPath = tuple[str | int, ...]  # ("rehearse", "faults", 0, "kill")

LISTED_MAX = 13  # a longer list of keys helps nobody: then only the nearest is named


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem, or a notice. `line` counts from 1; 0 for the file as a whole. `key` may be empty."""

    file: str
    line: int
    key: str
    message: str

    def __str__(self) -> str:
        """`run.yaml:12: rollout.replica: unknown key; ...`, always on one line."""
        where = f"{self.file}:{self.line}" if self.line else self.file
        return _on_one_line(": ".join(part for part in (where, self.key, self.message) if part))


def in_order(found: Iterable[Problem]) -> list[Problem]:
    """By file, and there by line."""
    return sorted(found, key=lambda one: (one.file, one.line))


class ConfigError(Exception):
    """A run.yaml that cannot be run. `problems` is never empty and is in the order of the file's lines."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = in_order(problems)
        super().__init__(str(self))

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


@dataclass(slots=True)
class Findings:
    """Collects problems of one file; `lines` says on which line each key of it stands.

    Where the file extends another, `files` says in which of them.
    """

    file: str
    lines: dict[KeyPath, int]
    files: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notices: list[Problem] = field(default_factory=list)  # what runs, and perhaps not as it was meant
    refused: set[KeyPath] = field(default_factory=set)  # keys whose value nobody may rely on
    spelled: dict[KeyPath, KeyPath] = field(default_factory=dict)  # how the file itself calls a key

    def add(self, path: KeyPath, message: str, line: int = 0) -> None:
        """Report a value, on the line of its key, or on `line`.

        A path below a shorthand (`replicas: 2`) is reported as the key that the file has. A key is reported once:
        what comes later follows from what came first.
        """
        known = self._known(path)
        shown = dotted(self.spelled.get(known, known))
        self.refused.add(path)
        if not any(problem.key == shown for problem in self.problems):
            self.problems.append(Problem(self._file(known), line or self.lines[known], shown, message))

    def notice(self, path: KeyPath, message: str) -> None:
        """Point to a value with which the file can be run all the same."""
        known = self._known(path)
        shown = dotted(self.spelled.get(known, known))
        self.notices.append(Problem(self._file(known), self.lines[known], shown, message))

    def rename(self, path: KeyPath, better: KeyPath) -> None:
        """Know a key of the file by another name from now on; reports still show the file's own."""
        if path in self.lines and path != better:
            self.lines[better] = self.lines[path]
            if path in self.files:
                self.files[better] = self.files[path]
            self.spelled[better] = path

    def missing(self, path: KeyPath, message: str) -> None:
        """Report a key that ought to be there, on the line of what ought to hold it."""
        known = self._known(path)
        self.problems.append(Problem(self._file(known), self.lines[known], dotted(path), message))
        self.refused.add(path)

    def doubtful(self, path: KeyPath) -> bool:
        """Tell whether the value at `path`, or one that holds it, was reported."""
        return any(path[:length] in self.refused for length in range(len(path) + 1))

    def holds_doubtful(self, path: KeyPath) -> bool:
        """Tell whether the value at `path`, or one below it, was reported."""
        return any(refused[: len(path)] == path for refused in self.refused)

    def _file(self, known: KeyPath) -> str:
        return self.files.get(known, self.file)

    def _known(self, path: KeyPath) -> KeyPath:
        while path and path not in self.lines:
            path = path[:-1]
        return path


def unknown_key(name: str, allowed: Iterable[str], whose: str = "") -> str:
    """The message for a key that is none of `allowed`; `whose` names the vocabulary where it is not ours."""
    keys = sorted(allowed)
    message = f"unknown key, not one of {whose}" if whose else "unknown key"
    if not whose and len(keys) <= LISTED_MAX:
        message += "; expected one of " + ", ".join(keys)
    return message + did_you_mean(name, keys)


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """`; did you mean "replicas"?`, or nothing where no candidate is near."""
    candidates = {candidate.lower().replace("_", "-"): candidate for candidate in allowed}
    near = difflib.get_close_matches(name.lower().replace("_", "-"), candidates, n=1)
    return f'; did you mean "{candidates[near[0]]}"?' if near else ""


def dotted(path: KeyPath) -> str:
    """`rehearse.faults[0].kill`"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _on_one_line(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
