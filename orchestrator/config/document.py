"""Parse a run.yaml into plain data with the line of every key, and merge it over the file that it `extends`.

Scalars follow the core schema of YAML 1.2. PyYAML's 1.1 reads `1e-6` as a string, `no` as false and `1:30` as 90,
which has broken runs. `texts` keeps the original spelling of each scalar. The result survives a round trip
through JSON unchanged.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from grpo_orch.orchestrator.config.problems import ConfigError, Findings, KeyPath, Problem

DEPTH_MAX = 40
NODES_MAX = 20_000  # aliases make a small file large
INTEGER_MAX = 2**63 - 1
# Values here and below may be secrets; messages must not quote them.
OPTIONS: KeyPath = ("storage", "options")
NOT_QUOTED: tuple[KeyPath, ...] = (OPTIONS, ("secrets",))

_TAG = "tag:yaml.org,2002:"
# PyYAML quotes these names; an unquoted secret that begins with *, & or ! looks like one.
_QUOTED_NAME = re.compile(r"(alias|anchor|handle) '[^']*'")


class _CoreLoader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # PyYAML's own class attribute


for _name, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
):
    _CoreLoader.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), list(_first))


@dataclass(slots=True)
class Document:
    """A parsed file. `lines` has an entry for each key and list item; the root is the empty path, on line 1.

    `files` maps each key to its file, if there are several.
    """

    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=lambda: {(): 1})
    texts: dict[KeyPath, str] = field(default_factory=dict)
    files: dict[KeyPath, str] = field(default_factory=dict)


def parse(source: bytes, file: str) -> tuple[Document, Findings]:
    """Parse YAML; problems with single keys are in the Findings.

    Raises ConfigError if the whole file is unreadable: not YAML, not UTF-8, more than one document.
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
        details = _QUOTED_NAME.sub(r"\1", ", ".join(part for part in (error.context, error.problem) if part))
        raise ConfigError([Problem(file, mark.line + 1 if mark else 0, "", f"not YAML: {details}")]) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError([Problem(file, line, "", "not YAML: contains a control character")]) from error
    except (ValueError, OverflowError, RecursionError) as error:
        # PyYAML does not catch these: an escape beyond Unicode, a version number of 5,000 digits, deep nesting.
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
            self._findings.add(path, f"the tag {node.tag} is not supported; expected a plain mapping")
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                self._findings.add(
                    path, "merge keys (<<) and complex keys are not supported; write out the keys", line
                )
                continue
            key = str(key_node.value)
            below = (*path, key)
            if key in mapping:
                first = self._document.lines[below]
                self._findings.add(below, f"duplicate key, first set on line {first}; remove one of the two", line)
                continue
            if problem := _text_problem(key):
                self._findings.add(path, f"invalid key: it {problem}; remove it", line)
                continue
            self._document.lines[below] = line
            mapping[key] = self.value(value_node, below)
        return mapping

    def _sequence(self, node: yaml.SequenceNode, path: KeyPath) -> list[Any]:
        if node.tag != _TAG + "seq":
            self._findings.add(path, f"the tag {node.tag} is not supported; expected a plain list")
        items: list[Any] = []
        for index, item in enumerate(node.value):
            below = (*path, index)
            self._document.lines[below] = item.start_mark.line + 1
            items.append(self.value(item, below))
        return items

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        self._document.texts[path] = node.value
        try:
            return _plain(node.tag.removeprefix(_TAG), str(node.value))
        except ValueError as error:
            may_be_secret = any(path[: len(prefix)] == prefix for prefix in NOT_QUOTED)
            self._findings.add(path, "cannot be parsed; put it in quotes" if may_be_secret else str(error))
            return None


def _plain(tag: str, text: str) -> bool | int | float | str | None:
    """Return the scalar's value. Raises ValueError with a message for the user."""
    match tag:
        case "null":
            return None
        case "bool":
            if text.lower() not in ("true", "false"):
                raise ValueError(f"expected true or false, got {_short(text)}")
            return text.lower() == "true"
        case "int" | "float":
            return _number(tag, text)
        case "str":
            if problem := _text_problem(text):
                raise ValueError(f"{problem}; remove it")
            return text
    raise ValueError(f"the tag {tag} is not supported; expected a plain value")


def _number(tag: str, text: str) -> int | float:
    try:
        number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        raise ValueError(f"expected a number, got {_short(text)}") from None
    # JSON has no infinity or NaN: the run's copy of the file would hold null instead.
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {_short(text)}")
    if tag == "float":
        return number
    if abs(number) > INTEGER_MAX:
        raise ValueError(f"expected a 64-bit integer, got {_short(text)}")
    return int(text)


def _text_problem(text: str) -> str:
    """Return why files, programs and stores cannot take the text, or an empty string."""
    if "\0" in text:
        return "contains a NUL character"
    if any("\ud800" <= char <= "\udfff" for char in text):
        return "contains half of a surrogate pair, which is not valid Unicode"
    return ""


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


# A file is merged over the one it extends by JSON Merge Patch (RFC 7396): mappings key by key, null removes a key,
# any other value, lists included, replaces the old one. The file and line of each key are kept.

EXTENDS = "extends"


def read_document(path: Path) -> tuple[Document, Findings, Path]:
    """Return a run.yaml as one mapping, with `extends` resolved, and the folder for its relative paths.

    That is the folder of the base file, the one without `extends`. Raises ConfigError.
    """
    return _read(path, (), Problem(str(path), 0, "", "no such file; `grpo-orch init` writes one"))


def _read(path: Path, extended_by: tuple[Path, ...], missing: Problem) -> tuple[Document, Findings, Path]:
    """Read a file and the files it extends; `missing` is raised if it does not exist."""
    file = str(path)
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError([missing]) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise ConfigError([Problem(file, 0, "", f"cannot read the file: {reason}")]) from error
    document, findings = parse(source, file)
    if not isinstance(document.data, dict):
        problem = "is empty" if document.data is None else "is not a mapping"
        expected = "expected name, storage, trainer, grpo; `grpo-orch init` writes a file to start from"
        raise ConfigError([*findings.problems, Problem(file, 1, "", f"the file {problem}; {expected}")])
    if EXTENDS not in document.data:
        return document, findings, path.absolute().parent
    extended = document.data.pop(EXTENDS)
    line = document.lines[(EXTENDS,)]
    if not isinstance(extended, str) or not extended or "\0" in extended:
        raise ConfigError([Problem(file, line, EXTENDS, "expected the path of the run.yaml to extend")])
    base_path = Path(os.path.normpath(path.parent / extended))
    seen = (*extended_by, path.resolve())
    if base_path.resolve() in seen:
        message = f"circular: {base_path} is or extends this file; remove one `extends`"
        raise ConfigError([Problem(file, line, EXTENDS, message)])
    message = f"no such file: {base_path}; expected a path relative to the folder of this file"
    base, base_findings, workdir = _read(base_path, seen, Problem(file, line, EXTENDS, message))
    merged = _merge_documents(base, str(base_path), document, file)
    both = Findings(file, merged.lines, merged.files, [*findings.problems, *base_findings.problems])
    both.reported = findings.reported | base_findings.reported
    return merged, both, workdir


def _merge_documents(base: Document, base_file: str, patch: Document, file: str) -> Document:
    files = dict.fromkeys(base.lines, base_file) | base.files
    merged = Document(base.data, base.lines, base.texts, files)
    merged.data = _merge(merged, base.data, patch.data, ())
    merged.lines |= patch.lines
    merged.files |= dict.fromkeys(patch.lines, file)
    merged.texts |= patch.texts
    return merged


def _merge(document: Document, base: Any, patch: Any, path: KeyPath) -> Any:
    """Merge `patch` over `base`, and drop the lines and texts of replaced values from `document`."""
    if not isinstance(patch, dict) or not isinstance(base, dict):
        _forget(document, path)
    if not isinstance(patch, dict):
        return patch
    result = dict(base) if isinstance(base, dict) else {}
    for key, value in patch.items():
        if value is None:
            _forget(document, (*path, key))
            result.pop(key, None)
        else:
            result[key] = _merge(document, result.get(key), value, (*path, key))
    return result


def _forget(document: Document, path: KeyPath) -> None:
    for entries in (document.lines, document.texts, document.files):
        for key_path in [key_path for key_path in entries if key_path[: len(path)] == path]:
            del entries[key_path]
