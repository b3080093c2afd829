"""Finds a user's functions without importing them: a controller has no torch, and importing runs their code.

A module is looked for where the trainer will import it from, the folder of run.yaml first, then where Python
itself would look. Its source is parsed, not run.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from orchestrator.config.reading.problems import did_you_mean

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
Misfit = Callable[[ast.stmt, str], str]  # what is wrong with a function of that definition and name


def function_problem(path: str, workdir: Path, *, has_setup: bool, misfit: Misfit) -> str:
    """What is wrong with a function's import path; empty where nothing is.

    A module that is not here may be installed by the trainer's `setup`: then it is let pass.
    """
    module, dot, name = path.rpartition(".")
    if not dot or not all(part.isidentifier() for part in path.split(".")):
        return f"expected an import path, module.function, got {path!r}"
    importlib.invalidate_caches()  # the module may have been written a moment ago
    spec, known = _find(module, workdir)
    if spec is None:
        if has_setup and not known:
            return ""
        if known:
            return f"no module {module}, though there is {known}; expected a file {_file_of(module)}"
        expected = f"expected a file {_file_of(module)}, or its package in trainer.setup"
        return f"no module {module} in {workdir} or the installed packages; {expected}"
    if spec.origin is None:
        return f"{module} is a folder, not a module; expected module.function"
    if not spec.origin.endswith(".py"):
        return ""  # compiled: there is nothing to read
    node, problem = _named(Path(spec.origin), name)
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        imported = next(one.name for one in node.names if (one.asname or one.name) == name)
        return function_problem(f"{node.module}.{imported}", workdir, has_setup=has_setup, misfit=misfit)
    return problem if node is None else misfit(node, name)


def _find(module: str, workdir: Path) -> tuple[ModuleSpec | None, str]:
    """The module's spec, or the longest part of its name that was found."""
    search: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        if length == 1:
            spec = PathFinder.find_spec(name, [str(workdir)]) or _installed(name)
        else:
            spec = PathFinder.find_spec(name, search)
        if spec is None:
            return None, ".".join(parts[: length - 1])
        search = list(spec.submodule_search_locations or ())
    return spec, module


def _installed(name: str) -> ModuleSpec | None:
    """Ask Python's own finders, which locate a top-level module without running it."""
    found = (finder.find_spec(name, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in found if spec is not None), None)


def _named(source: Path, name: str) -> tuple[ast.stmt | None, str]:
    """What binds the name in a module, or why there is no such thing; neither where that cannot be told."""
    try:
        tree = ast.parse(source.read_bytes())
    except SyntaxError as error:
        return None, f"{source}:{error.lineno}: {error.msg}"
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{source} cannot be read: {error}"
    names = dict(_names(tree.body))
    if name not in names:
        if "*" in names or "__getattr__" in names:
            return None, ""  # it may come from there
        functions = [one for one, node in names.items() if isinstance(node, FUNCTION | ast.ClassDef)]
        expected = f"expected a function of that name{did_you_mean(name, functions)}"
        return None, f"{source.name} defines no {name}; {expected}"
    return names[name], ""


def _names(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names bound at the top level of a module, those under `if`, `try` and `with` too."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
            case ast.Assign():
                targets = [one for target in node.targets for one in ast.walk(target)]
                yield from ((one.id, node) for one in targets if isinstance(one, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case ast.Import() | ast.ImportFrom():
                yield from (((one.asname or one.name).split(".")[0], node) for one in node.names)
            case _:
                for part in ("body", "orelse", "finalbody"):
                    yield from _names(getattr(node, part, ()))
                for handler in getattr(node, "handlers", ()):
                    yield from _names(handler.body)


def _file_of(module: str) -> str:
    return module.replace(".", "/") + ".py"
