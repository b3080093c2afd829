"""A user's functions, found without importing them: a controller has no torch, and importing runs their code.

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

from orchestrator.config.problems import Findings, did_you_mean

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
    return _problem(module, name, workdir, misfit, has_setup, ())


def _problem(module: str, name: str, workdir: Path, misfit: Misfit, may_lack: bool, seen: tuple[str, ...]) -> str:
    """The same, of a name that other modules may import; `seen` are those that led here."""
    if (path := f"{module}.{name}") in seen:
        return ""  # modules that import one another: Python knows which comes first
    spec, known = _find(module, workdir)
    if spec is None:
        if may_lack and not known:
            return ""
        if known:
            return f"no module {module}, though there is {known}; expected a file {_file_of(module)}"
        expected = f"expected a file {_file_of(module)}, or its package in trainer.setup"
        return f"no module {module} in {workdir} or the installed packages; {expected}"
    if spec.origin is None:
        return f"{module} is a folder, not a module; expected module.function"
    if not spec.origin.endswith(".py"):
        return ""  # compiled: there is nothing to read
    nodes, problem = _named(Path(spec.origin), name)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported = next(one.name for one in node.names if (one.asname or one.name).split(".")[0] == name)
            # Nodes have libraries that are not here, as TRL.
            problem = _problem(node.module, imported, workdir, misfit, True, (*seen, path))
        else:
            problem = misfit(node, name)
        if not problem:
            return ""  # which of several it is only Python can tell, as under `if` and `try`
    return problem


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


def _named(source: Path, name: str) -> tuple[list[ast.stmt], str]:
    """What binds the name in a module, or why nothing does; neither where that cannot be told."""
    try:
        tree = ast.parse(source.read_bytes())
        bound = list(_names(tree.body))
    except SyntaxError as error:
        return [], f"{source}:{error.lineno}: {error.msg}"
    except (RecursionError, MemoryError):
        return [], ""  # nested deeper than can be read here
    except (OSError, ValueError) as error:
        return [], f"{source} cannot be read: {error}"
    nodes = [node for one, node in bound if one == name]
    if nodes or any(one in ("*", "__getattr__") for one, _ in bound) or any(map(_binds_unseen, ast.walk(tree))):
        return nodes, ""  # where there are none it may come from elsewhere
    functions = [one for one, node in bound if isinstance(node, FUNCTION | ast.ClassDef)]
    expected = f"expected a function of that name{did_you_mean(name, functions)}"
    return [], f"{source.name} defines no {name}; {expected}"


def _binds_unseen(node: ast.AST) -> bool:
    """Whether it may bind names of the module that its source does not show."""
    match node:
        case ast.Name(id="globals" | "locals" | "vars" | "exec") | ast.Attribute(attr="modules") | ast.Global():
            return True
    return False


def _names(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names bound at the top level of a module, those under `if`, `try`, `for`, `match` and `with` too."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
            case ast.Import() | ast.ImportFrom():
                yield from (((one.asname or one.name).split(".")[0], node) for one in node.names)
            case _:
                for part in ("body", "orelse", "finalbody"):
                    yield from _names(getattr(node, part, ()))
                for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                    yield from _names(part.body)
                stored = (one for one in ast.walk(node) if isinstance(one, ast.Name))
                yield from ((one.id, node) for one in stored if isinstance(one.ctx, ast.Store))


def _file_of(module: str) -> str:
    return module.replace(".", "/") + ".py"


# Modules next to run.yaml that hide others: its folder comes first where a run's processes import.

OURS = frozenset({"checkpoint", "orchestrator", "policies", "tasks"})
LIBRARIES = frozenset(
    {
        *("accelerate", "aiohttp", "blake3", "datasets", "fsspec", "httpx", "huggingface_hub", "msgspec"),
        *("numpy", "obstore", "pandas", "peft", "psutil", "pyarrow", "pydantic", "requests", "safetensors"),
        *("structlog", "tenacity", "tokenizers", "torch", "tqdm", "transformers", "trl", "vllm", "yaml"),
    }
)
HARMLESS = frozenset({"antigravity", "idlelib", "test", "this", "turtledemo"})  # of Python's, imported by nobody


def check_shadows(workdir: Path, findings: Findings) -> None:
    """Report all modules and packages in the folder of run.yaml that have the name of one that is needed."""
    try:
        modules = [
            one for one in sorted(workdir.iterdir()) if one.suffix == ".py" or (one / "__init__.py").is_file()
        ]
    except OSError:
        return
    shadows = [(path.name, whose, path.stem) for path in modules if (whose := _whose(path.stem))]
    if shadows:
        named = ", ".join(f"{name} ({whose} `{stem}`)" for name, whose, stem in shadows)
        message = f"beside this file take the place of other modules: {named}; rename {_them(len(shadows))}"
        findings.add(("trainer",), message)


def _them(count: int) -> str:
    return "it" if count == 1 else "them"


def _whose(name: str) -> str:
    if name in OURS:
        return "grpo-orch's own"
    if name in LIBRARIES:
        return "the library"
    return "Python's own" if name in sys.stdlib_module_names - HARMLESS else ""
