"""Check a user's functions without importing them: a controller has no torch, and an import runs code.

Modules are searched where the trainer imports from: the folder of run.yaml, then Python's own path. Their source
is parsed, not run.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import grpo_orch
from grpo_orch.orchestrator.config.problems import Findings, did_you_mean

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
Misfit = Callable[[ast.stmt, str], str]  # returns the problem with a function's definition, given its name


def function_problem(path: str, workdir: Path, *, has_setup: bool, misfit: Misfit) -> str:
    """Return the problem with a function's import path, or an empty string.

    With `has_setup` a missing module is accepted, since the trainer's `setup` may install it.
    """
    module, dot, name = path.rpartition(".")
    if not dot or not all(part.isidentifier() for part in path.split(".")):
        return f"expected an import path, module.function, got {path!r}"
    importlib.invalidate_caches()  # the module may have been written a moment ago
    return _problem(module, name, workdir, misfit, has_setup, ())


def _problem(
    module: str, name: str, workdir: Path, misfit: Misfit, may_be_missing: bool, seen: tuple[str, ...]
) -> str:
    """As `function_problem`, following imports; `seen` holds the import paths followed so far."""
    if (path := f"{module}.{name}") in seen:
        return ""  # circular imports: the result depends on Python's import order
    spec, parent = _find(module, workdir)
    if spec is None:
        if may_be_missing and not parent:
            return ""
        if parent:
            return f"{parent} has no module {module}; expected a file {_file_of(module)}"
        expected = f"expected a file {_file_of(module)}, or its package in trainer.setup"
        return f"no module {module} in {workdir} or the installed packages; {expected}"
    if spec.origin is None:
        return f"{module} is a folder, not a module; expected module.function"
    if not spec.origin.endswith(".py"):
        return ""  # compiled, without source
    nodes, problem = _bindings_of(module, Path(spec.origin), name)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported = next(alias.name for alias in node.names if _bound_name(alias) == name)
            # Nodes have libraries that are missing here, such as TRL.
            problem = _problem(node.module, imported, workdir, misfit, True, (*seen, path))
        else:
            problem = misfit(node, name)
        if not problem:
            return ""  # under `if` and `try`, any of several bindings may be the valid one
    return problem


def _find(module: str, workdir: Path) -> tuple[ModuleSpec | None, str]:
    """Return the module's spec and name; or None and the longest parent package that exists."""
    search: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        if length == 1:
            spec = PathFinder.find_spec(name, [str(workdir)])
            if spec is None or spec.origin is None:  # Python prefers a package to a plain folder of that name
                spec = _installed(name) or spec
        else:
            spec = PathFinder.find_spec(name, search)
        if spec is None:
            return None, ".".join(parts[: length - 1])
        search = list(spec.submodule_search_locations or ())
    return spec, module


def _installed(name: str) -> ModuleSpec | None:
    """Search Python's finders, which locate a top-level module without running it."""
    specs = (finder.find_spec(name, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in specs if spec is not None), None)


def _bindings_of(module: str, source: Path, name: str) -> tuple[list[ast.stmt], str]:
    """Return the statements that bind a name in a module, or the problem; neither if it is unknown."""
    try:
        tree = ast.parse(source.read_bytes())
        bindings = list(_bindings(tree.body))
    except SyntaxError as error:
        return [], f"{source}:{error.lineno}: {error.msg}"
    except (RecursionError, MemoryError):
        return [], ""  # too deeply nested to parse
    except (OSError, ValueError) as error:
        return [], f"cannot read {source}: {error}"
    nodes = [node for bound, node in bindings if bound == name]
    is_dynamic = any(bound in ("*", "__getattr__") for bound, _ in bindings)
    if nodes or is_dynamic or any(map(_may_bind_names, ast.walk(tree))):
        return nodes, ""
    functions = [bound for bound, node in bindings if isinstance(node, FUNCTION | ast.ClassDef | ast.ImportFrom)]
    expected = f"expected a function of that name{did_you_mean(name, functions)}"
    file = source.name if "." not in module and source.name != "__init__.py" else module
    return [], f"{file} does not define {name}; {expected}"


def _may_bind_names(node: ast.AST) -> bool:
    """Return whether the node may bind module-level names that parsing cannot find."""
    match node:
        case ast.Name(id="globals" | "locals" | "vars" | "exec") | ast.Attribute(attr="modules") | ast.Global():
            return True
    return False


def _bindings(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield names bound at the top level of a module, including under `if`, `try`, `for`, `match` and `with`."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
            case ast.Import() | ast.ImportFrom():
                yield from ((_bound_name(alias), node) for alias in node.names)
            case _:
                for part in ("body", "orelse", "finalbody"):
                    yield from _bindings(getattr(node, part, ()))
                for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                    yield from _bindings(part.body)
                names = (child for child in ast.walk(node) if isinstance(child, ast.Name))
                yield from ((name.id, node) for name in names if isinstance(name.ctx, ast.Store))


def _bound_name(alias: ast.alias) -> str:
    return (alias.asname or alias.name).split(".")[0]


def _file_of(module: str) -> str:
    return module.replace(".", "/") + ".py"


# Modules next to run.yaml that hide others: a run's processes import from its folder first.

LIBRARIES = frozenset(
    {
        *("accelerate", "aiohttp", "blake3", "datasets", "fsspec", "httpx", "huggingface_hub", "msgspec"),
        *("numpy", "obstore", "pandas", "peft", "psutil", "pyarrow", "pydantic", "requests", "safetensors"),
        *("structlog", "tenacity", "tokenizers", "torch", "tqdm", "transformers", "trl", "vllm", "yaml"),
    }
)
# In the standard library, but no process imports them.
NOT_IMPORTED = frozenset({"antigravity", "idlelib", "test", "this", "turtledemo"})


def check_shadows(workdir: Path, findings: Findings) -> None:
    """Report modules in the folder of run.yaml that hide modules which the run imports."""
    try:
        modules = [
            path for path in sorted(workdir.iterdir()) if path.suffix == ".py" or (path / "__init__.py").is_file()
        ]
    except OSError:
        return
    shadows = [
        (path.name, owner, path.stem) for path in modules if (owner := _owner(path.stem)) and not _is_ours(path)
    ]
    if shadows:
        hidden = ", ".join(f"{name} hides {owner} `{stem}`" for name, owner, stem in shadows)
        pronoun = "it" if len(shadows) == 1 else "them"
        findings.add(("trainer",), f"modules in the folder of this file: {hidden}; rename {pronoun}")


def _is_ours(path: Path) -> bool:
    """Return whether the path is this project's own package, as in a checkout's root."""
    return path.is_dir() and path.samefile(Path(grpo_orch.__file__).parent)


def _owner(name: str) -> str:
    if name == "grpo_orch":
        return "this project's"
    if name in LIBRARIES:
        return "the library"
    return "Python's" if name in sys.stdlib_module_names - NOT_IMPORTED else ""
