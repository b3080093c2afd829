"""Problems and notices of a run.yaml, one line each, with file, line and key.

Every check reports to one `Findings` and continues, so users see all problems of a file at once. Only `load` and
its variants raise, and only ConfigError.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

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
    original_paths: dict[KeyPath, KeyPath] = field(default_factory=dict)  # of renamed keys, as in the file

    def add(self, path: KeyPath, message: str, line: int = 0) -> None:
        """Report a value on the line of its key, or on `line`.

        A path below a shorthand (`replicas: 2`) is reported as the key in the file. Each key is reported once:
        later problems usually follow from the first.
        """
        known = self._nearest_known(path)
        key = dotted(self.original_paths.get(known, known))
        self.reported.add(path)
        if not any(problem.key == key for problem in self.problems):
            self.problems.append(Problem(self._file(known), line or self.lines[known], key, message))

    def notice(self, path: KeyPath, message: str) -> None:
        """Add a notice about a valid value."""
        known = self._nearest_known(path)
        key = dotted(self.original_paths.get(known, known))
        self.notices.append(Problem(self._file(known), self.lines[known], key, message))

    def rename(self, path: KeyPath, new_path: KeyPath) -> None:
        """Register a second path for a key; reports still show the path in the file."""
        if path in self.lines and path != new_path:
            self.lines[new_path] = self.lines[path]
            if path in self.files:
                self.files[new_path] = self.files[path]
            self.original_paths[new_path] = path

    def missing(self, path: KeyPath, message: str) -> None:
        """Report a missing key, on the line of the section it belongs to."""
        known = self._nearest_known(path)
        self.problems.append(Problem(self._file(known), self.lines[known], dotted(path), message))
        self.reported.add(path)

    def is_reported(self, path: KeyPath) -> bool:
        """Return whether the value at `path`, or one that contains it, was reported."""
        return any(path[:length] in self.reported for length in range(len(path) + 1))

    def is_reported_within(self, path: KeyPath) -> bool:
        """Return whether the value at `path`, or one below it, was reported."""
        return any(reported[: len(path)] == path for reported in self.reported)

    def _file(self, known: KeyPath) -> str:
        return self.files.get(known, self.file)

    def _nearest_known(self, path: KeyPath) -> KeyPath:
        while path and path not in self.lines:
            path = path[:-1]
        return path


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
