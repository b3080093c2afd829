"""The wheel that nodes get: it installs, it is the same for the same files, and it is another for others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from grpo_orch.orchestrator.cli.prepare import recipe_lines
from grpo_orch.orchestrator.clouds.wheel import build_wheel

ROOT = Path(__file__).parents[3]
BUILD = "import sys; from pathlib import Path; from grpo_orch.orchestrator.clouds.wheel import build_wheel; "
BUILD += "print(build_wheel(Path(sys.argv[1])))"

LOOK = """
import importlib.resources, os
import grpo_orch.checkpoint.store.run_store, grpo_orch.policies.control.decide, grpo_orch.tasks
from importlib import metadata
from grpo_orch.orchestrator.config.load import load_spec
from grpo_orch.orchestrator.cli.prepare import recipe_lines

print(grpo_orch.tasks.__file__)
print((importlib.resources.files("grpo_orch.tasks") / "sky" / "setup.sh").is_file())
print((importlib.resources.files("grpo_orch.orchestrator.config") / "template.yaml").is_file())
print(*recipe_lines())
found = next(iter(metadata.distributions(name="grpo-orch", path=[os.environ["PYTHONPATH"]])))
print(*(one for one in found.requires if 'extra == "node"' in one))
print(*found.entry_points)
"""


def built_in(checkout: Path, folder: Path) -> Path:
    """The wheel as a process builds it whose packages are the checkout's."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    argv = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(argv, env=environment, cwd=folder.parent, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the packages, with what collects in a working tree."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "grpo_orch", folder / "grpo_orch", symlinks=True)
    for link in (folder / "grpo_orch").iterdir():
        if link.is_symlink():
            shutil.copytree(ROOT / link.name, folder / link.name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").mkdir()
    (folder / "tests" / "test_x.py").write_text("")
    (folder / "tasks" / "__pycache__").mkdir()
    (folder / "tasks" / "__pycache__" / "machine.cpython-311.pyc").write_bytes(b"stale")
    (folder / "tasks" / ".machine.py.swp").write_bytes(b"an editor's")
    return folder


def test_wheel_installs_with_its_data_and_extras(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path / "wheels")
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, f"{wheel}[node]"], check=True)
    (tmp_path / "look.py").write_text(LOOK)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    run = subprocess.run(
        [sys.executable, "look.py"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    where, script, table, recipes, extra, entry = run.stdout.splitlines()
    assert where == str(target / "grpo_orch" / "tasks" / "__init__.py")
    assert (script, table) == ("True", "True")
    assert recipes.split() == [*recipe_lines()]
    assert "vllm==" in extra
    assert "grpo_orch.orchestrator.cli:main" in entry


def test_same_files_make_the_same_wheel_under_its_digest(tmp_path: Path, checkout: Path) -> None:
    here = build_wheel(tmp_path / "a")
    again = build_wheel(tmp_path / "b")
    there = built_in(checkout, tmp_path / "c")
    assert here.read_bytes() == again.read_bytes() == there.read_bytes()
    assert (
        here.relative_to(tmp_path / "a") == again.relative_to(tmp_path / "b") == there.relative_to(tmp_path / "c")
    )


def test_an_edited_checkout_is_another_wheel(tmp_path: Path, checkout: Path) -> None:
    before = built_in(checkout, tmp_path / "wheels")
    with (checkout / "tasks" / "sky" / "run.sh").open("a") as script:
        script.write("# edited\n")
    after = built_in(checkout, tmp_path / "wheels")
    assert before.name == after.name
    assert before.parent != after.parent
    assert before.exists()


def test_existing_wheel_is_not_rebuilt(tmp_path: Path) -> None:
    before = build_wheel(tmp_path).stat()
    assert build_wheel(tmp_path).stat() == before


def test_setuptools_includes_all_non_module_files(tmp_path: Path) -> None:
    """`pip install` of the project has what the wheel here has."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    names = {name for name in zipfile.ZipFile(build_wheel(tmp_path)).namelist() if ".dist-info/" not in name}
    modules = {name for name in names if name.endswith(".py") and (ROOT / name).with_name("__init__.py").exists()}
    data = {f"{package.replace('.', '/')}/{one}" for package, globs in told.items() for one in globs}
    left = names - modules - {path.relative_to(ROOT).as_posix() for one in data for path in ROOT.glob(one)}
    assert {name for name in left if (ROOT / name).stat().st_size} == set()


def test_neither_tests_nor_caches_nor_hidden_files_are_inside(tmp_path: Path, checkout: Path) -> None:
    names = zipfile.ZipFile(built_in(checkout, tmp_path / "wheels")).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top.removesuffix(".dist-info").partition("-")[0] for top in tops} == {"grpo_orch"}
    assert len(tops) == 2
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".swp"))]
    every = {f"grpo_orch/{path.relative_to(checkout).as_posix()}" for path in checkout.glob("[!gt]*/**/*.py")}
    assert every
    assert every <= set(names)
