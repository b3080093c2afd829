"""A run.yaml as one document: YAML as plain data with the line of every key, laid over the file that it `extends`.

Scalars are read by the core schema of YAML 1.2, not by PyYAML's 1.1: there `1e-6` is text, `no` is false and
`1:30` is 90, and all three have cost people runs. The file's own spelling of each scalar is kept in `texts`.
The result can be written as JSON and read back unchanged.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from orchestrator.config.problems import ConfigError, Findings, KeyPath, Problem

DEPTH_MAX = 40
NODES_MAX = 20_000  # aliases make a small file large
INTEGER_MAX = 2**63 - 1
# What stands there or below may be a secret, which no message may quote.
OPTIONS: KeyPath = ("storage", "options")
NOT_QUOTED: tuple[KeyPath, ...] = (OPTIONS, ("secrets",))

_TAG = "tag:yaml.org,2002:"
# PyYAML quotes these names, and an unquoted secret that begins with *, & or ! looks like one.
_NAMED = re.compile(r"(alias|anchor|handle) '[^']*'")


class _CoreLoader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # PyYAML's own class attribute


for _name, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
):
    _CoreLoader.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), list(_first))


@dataclass(slots=True)
class Document:
    """A parsed file. `lines` has an entry for each key and list item; the root is the empty path, on line 1.

    `files` says of each key in which file it stands, where that is not the only one.
    """

    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=lambda: {(): 1})
    texts: dict[KeyPath, str] = field(default_factory=dict)
    files: dict[KeyPath, str] = field(default_factory=dict)


def parse(source: bytes, file: str) -> tuple[Document, Findings]:
    """Read YAML; what is wrong with single keys is in the Findings.

    Raises ConfigError where nothing can be read: no YAML, no UTF-8, more than one document.
    """
    root = _compose(source, file)
    document = Document()
    findings = Findings(file, document.lines)
    reader = _Reader(document, findings)
    document.data = None if root is None else reader.value(root, ())
    return document, findings


def _compose(source: bytes, file: str) -> yaml.Node | None:
    try:
        text = source.decode("utf-8")
    except UnicodeDecodeError as error:
        line = source.count(b"\n", 0, error.start) + 1
        raise ConfigError([Problem(file, line, "", "not UTF-8; expected text, saved as UTF-8")]) from error
    try:
        loader = _CoreLoader(text)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = _NAMED.sub(r"\1", ", ".join(part for part in (error.context, error.problem) if part))
        raise ConfigError([Problem(file, mark.line + 1 if mark else 0, "", f"not YAML: {what}")]) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError([Problem(file, line, "", "not YAML: a control character")]) from error
    except (ValueError, OverflowError, RecursionError) as error:
        # PyYAML lets these through: an escape beyond Unicode, a version number of 5,000 digits, deep nesting.
        raise ConfigError([Problem(file, 0, "", f"not YAML: {error}")]) from error


class _Reader:
    """Walks the nodes of one document."""

    def __init__(self, document: Document, findings: Findings) -> None:
        self._document = document
        self._findings = findings
        self._nodes = 0

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self._nodes += 1
        if len(path) > DEPTH_MAX or self._nodes > NODES_MAX:
            problem = Problem(
                self._findings.file,
                node.start_mark.line + 1,
                "",
                f"too deep or too large; expected at most {DEPTH_MAX} levels and {NODES_MAX} values",
            )
            raise ConfigError([problem])
        match node:
            case yaml.MappingNode():
                return self._mapping(node, path)
            case yaml.SequenceNode():
                return self._sequence(node, path)
            case yaml.ScalarNode():
                return self._scalar(node, path)
        raise AssertionError(f"PyYAML has no such node: {node!r}")

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        if node.tag != _TAG + "map":
            self._findings.add(path, f"the tag {node.tag} is not read; expected a plain mapping")
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                self._findings.add(path, "only plain keys are read, no merge (<<); write the keys out", line)
                continue
            key = str(key_node.value)
            below = (*path, key)
            if key in found:
                first = self._document.lines[below]
                self._findings.add(below, f"given twice, first on line {first}; remove one of the two", line)
                continue
            if problem := _no_text(key):
                self._findings.add(path, f"a key that is {problem}", line)
                continue
            self._document.lines[below] = line
            found[key] = self.value(value_node, below)
        return found

    def _sequence(self, node: yaml.SequenceNode, path: KeyPath) -> list[Any]:
        if node.tag != _TAG + "seq":
            self._findings.add(path, f"the tag {node.tag} is not read; expected a plain list")
        found: list[Any] = []
        for index, item in enumerate(node.value):
            below = (*path, index)
            self._document.lines[below] = item.start_mark.line + 1
            found.append(self.value(item, below))
        return found

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        self._document.texts[path] = node.value
        try:
            return _plain(node.tag.removeprefix(_TAG), str(node.value))
        except ValueError as error:
            secret = any(path[: len(above)] == above for above in NOT_QUOTED)
            self._findings.add(path, "cannot be read; put it in quotes" if secret else str(error))
            return None


def _plain(tag: str, text: str) -> bool | int | float | str | None:
    """The scalar's value. Raises ValueError, in words for the user."""
    match tag:
        case "null":
            return None
        case "bool":
            if text.lower() not in ("true", "false"):
                raise ValueError(f"{_short(text)} is neither true nor false")
            return text.lower() == "true"
        case "int" | "float":
            return _number(tag, text)
        case "str":
            if problem := _no_text(text):
                raise ValueError(problem)
            return text
    raise ValueError(f"the tag {tag} is not read; expected a plain value")


def _number(tag: str, text: str) -> int | float:
    try:
        number = float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        raise ValueError(f"{_short(text)} is not a number") from None
    # JSON has no infinity and no NaN: the run's own copy of the file would hold null in their place.
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {_short(text)}")
    if tag == "float":
        return number
    if abs(number) > INTEGER_MAX:
        raise ValueError(f"expected a number of at most 64 bits, got {_short(text)}")
    return int(text.replace("_", ""))


def _no_text(text: str) -> str:
    """Why no file, program or store could be told the text; empty where all can."""
    if "\0" in text:
        return "not for any file or program: it holds a character NUL"
    if any("\ud800" <= char <= "\udfff" for char in text):
        return "not valid Unicode: half of a surrogate pair"
    return ""


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


# A file over the one that it extends, by JSON Merge Patch (RFC 7396): a mapping is merged key by key, null takes
# a key away, anything else replaces the old value, lists too. The file and line of each key stay known.

EXTENDS = "extends"


def read_document(path: Path) -> tuple[Document, Findings, Path]:
    """A run.yaml as one mapping, without its `extends`, and the folder that its relative paths start at.

    That is the folder of the file at the other end, which extends none: what it names is named from there, whoever
    extends it. Raises ConfigError.
    """
    return _read(path, (), Problem(str(path), 0, "", "no such file; `grpo-orch init` writes one"))


def _read(path: Path, above: tuple[Path, ...], missing: Problem) -> tuple[Document, Findings, Path]:
    """`above`: those that extend it; `missing`: what is wrong where there is no such file."""
    file = str(path)
    if above and path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError([Problem(file, 0, "", "is no regular file; expected the run.yaml that another changes")])
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError([missing]) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", error)
        raise ConfigError([Problem(file, 0, "", f"cannot be read: {why}")]) from error
    document, findings = parse(source, file)
    if not isinstance(document.data, dict):
        what = "is empty" if document.data is None else "is not a mapping"
        expected = "expected name, storage, trainer, grpo; `grpo-orch init` writes a file to start from"
        raise ConfigError([*findings.problems, Problem(file, 1, "", f"the file {what}; {expected}")])
    if EXTENDS not in document.data:
        return document, findings, path.absolute().parent
    extended = document.data.pop(EXTENDS)
    line = document.lines[(EXTENDS,)]
    if not isinstance(extended, str) or not extended or "\0" in extended:
        raise ConfigError(
            [Problem(file, line, EXTENDS, "expected the path of the run.yaml that this one changes")]
        )
    below = Path(os.path.normpath(path.parent / extended))
    seen = (*above, path.resolve())
    if below.resolve() in seen:
        raise ConfigError(
            [Problem(file, line, EXTENDS, f"{below} extends this file, or is it; remove one of them")]
        )
    no_file = Problem(file, line, EXTENDS, f"there is no {below}; expected a path from the folder of this file")
    base, found, workdir = _read(below, seen, no_file)
    merged = _laid_over(base, str(below), document, file)
    both = Findings(file, merged.lines, merged.files, [*findings.problems, *found.problems])
    both.refused = findings.refused | found.refused
    return merged, both, workdir


def _laid_over(base: Document, extended: str, over: Document, file: str) -> Document:
    files = dict.fromkeys(base.lines, extended) | base.files
    merged = Document(base.data, base.lines, base.texts, files)
    merged.data = _merged(merged, base.data, over.data, ())
    merged.lines |= over.lines
    merged.files |= dict.fromkeys(over.lines, file)
    merged.texts |= over.texts
    return merged


def _merged(document: Document, base: Any, over: Any, path: KeyPath) -> Any:
    """`over` laid over `base`; of what is replaced the document forgets lines and spelling."""
    if not isinstance(over, dict) or not isinstance(base, dict):
        _forget(document, path)
    if not isinstance(over, dict):
        return over
    result = dict(base) if isinstance(base, dict) else {}
    for key, value in over.items():
        if value is None:
            _forget(document, (*path, key))
            result.pop(key, None)
        else:
            result[key] = _merged(document, result.get(key), value, (*path, key))
    return result


def _forget(document: Document, path: KeyPath) -> None:
    for known in (document.lines, document.texts, document.files):
        for below in [one for one in known if one[: len(path)] == path]:
            del known[below]
