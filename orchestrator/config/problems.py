"""Problems and notices of a run.yaml, one line each, with file, line and key.

Every check reports to one `Findings` and continues, so users see all problems of a file at once. Only `load` and
its variants raise, and only ConfigError.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

KeyPath = tuple[str | int, ...]  # ("rehearse", "faults", 0, "kill")

LISTED_MAX = 13  # of a longer list only the nearest key is named


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem or notice. `line` counts from 1; 0 means the whole file. `key` may be empty."""

    file: str
    line: int
    key: str
    message: str

    def __str__(self) -> str:
        """Return one line: `run.yaml:12: rollout.replica: unknown key; ...`."""
        where = f"{self.file}:{self.line}" if self.line else self.file
        return _on_one_line(": ".join(part for part in (where, self.key, self.message) if part))


def sort_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Sort by file, then by line."""
    return sorted(problems, key=lambda problem: (problem.file, problem.line))


class ConfigError(Exception):
    """Invalid run.yaml. `problems` is never empty and is sorted by file and line."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sort_problems(problems)
        super().__init__(str(self))

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


@dataclass(slots=True)
class Findings:
    """Collects the problems of one file. `lines` maps each key to its line.

    If the file extends another, `files` maps each key to its file.
    """

    file: str
    lines: dict[KeyPath, int]
    files: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notices: list[Problem] = field(default_factory=list)  # valid, but perhaps not what the user meant
    reported: set[KeyPath] = field(default_factory=set)  # keys whose value is unusable

    def add(self, path: KeyPath, message: str, line: int = 0) -> None:
        """Report a value on the line of its key, or on `line`.

        A path below a shorthand (`replicas: 2`) is reported as the key in the file. Each key is reported once:
        later problems usually follow from the first.
        """
        problem = self._located(path, message)
        self.reported.add(path)
        if not any(known.key == problem.key for known in self.problems):
            self.problems.append(replace(problem, line=line or problem.line))

    def notice(self, path: KeyPath, message: str) -> None:
        """Add a notice about a valid value."""
        self.notices.append(self._located(path, message))

    def missing(self, path: KeyPath, message: str) -> None:
        """Report a missing key, on the line of the section it belongs to."""
        self.problems.append(replace(self._located(path, message), key=dotted(path)))
        self.reported.add(path)

    def is_reported(self, path: KeyPath) -> bool:
        """Return whether the value at `path`, or one that contains it, was reported."""
        return any(path[:length] in self.reported for length in range(len(path) + 1))

    def is_reported_within(self, path: KeyPath) -> bool:
        """Return whether the value at `path`, or one below it, was reported."""
        return any(reported[: len(path)] == path for reported in self.reported)

    def _located(self, path: KeyPath, message: str) -> Problem:
        """Return a problem with the nearest key that the file has."""
        while path and path not in self.lines:
            path = path[:-1]
        return Problem(self.files.get(path, self.file), self.lines[path], dotted(path), message)


def unknown_key(name: str, allowed: Iterable[str], vocabulary: str = "") -> str:
    """Return the message for a key outside `allowed`. `vocabulary` is set for another project's keys."""
    keys = sorted(allowed)
    message = f"unknown key: not {vocabulary}" if vocabulary else "unknown key"
    if not vocabulary and len(keys) <= LISTED_MAX:
        message += "; expected one of " + ", ".join(keys)
    return message + did_you_mean(name, keys)


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return `; did you mean "replicas"?`, or an empty string without a close match."""
    candidates = {candidate.lower().replace("_", "-"): candidate for candidate in allowed}
    near = difflib.get_close_matches(name.lower().replace("_", "-"), candidates, n=1)
    return f'; did you mean "{candidates[near[0]]}"?' if near else ""


def dotted(path: KeyPath) -> str:
    """Return the path as text: `rehearse.faults[0].kill`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _on_one_line(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
