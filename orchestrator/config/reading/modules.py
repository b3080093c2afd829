"""Which files of a folder a module is made of: its own and those that it imports, read and not run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path


def modules_below(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return the files in `folder` of these modules, as `package.module`, and of all that they import from there.

    What is not in the folder, is no Python, or is imported while it runs, is left out.
    """
    found, left = dict[Path, None](), list(names)
    seen = set[str]()
    for name in left:  # which grows meanwhile
        if name in seen:
            continue
        seen.add(name)
        parts = name.split(".")
        parents = [".".join(parts[:end]) for end in range(1, len(parts))]  # their __init__ runs, too
        left += parents
        for path in _files(folder, parts):
            found[path] = None
            left += _imported(path, parts if path.name == "__init__.py" else parts[:-1])
    return list(found)


def _files(folder: Path, parts: list[str]) -> list[Path]:
    path = folder.joinpath(*parts)
    return [one for one in (path.with_name(f"{path.name}.py"), path / "__init__.py") if one.is_file()]


def _imported(path: Path, package: list[str]) -> Iterator[str]:
    """Names that may be modules: of `from a import b`, `a` and `a.b`."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (
                [base, *(f"{base}.{one.name}" for one in node.names if one.name != "*")]
                if base
                else (one.name for one in node.names if one.name != "*")
            )
