"""A run.yaml from its folder, laid over the file that it `extends`, where it extends one.

The rule is JSON Merge Patch's (RFC 7396): a mapping is merged key by key, null takes a key away, anything else
replaces what was there, lists too. Which file and line a key comes from stays known.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from orchestrator.config.problems import ConfigError, Findings, KeyPath, Problem
from orchestrator.config.reading.lines import Document, parse

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
