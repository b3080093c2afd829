"""Modules beside run.yaml that take the place of others: its folder comes first where a run's processes import."""

from __future__ import annotations

import sys
from pathlib import Path

from orchestrator.config.problems import Findings

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
