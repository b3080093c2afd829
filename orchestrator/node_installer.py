"""Make the environment in which this machine's nodes work: torch, TRL and vLLM, installed by uv from the lock.

A marker, written last, says what a complete environment was made of. An interrupted installation leaves none: the
next one starts again, from uv's cache. Only the standard library is imported: the Makefile runs this file before
any environment exists, as `python -m grpo_orch.orchestrator.node_installer FOLDER EXTRAS`.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import fcntl
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

LOCKS = Path(__file__).resolve().parent.parent / "tasks" / "sky" / "locks"
MADE_OF = ".made-of"  # the marker
LIBRARY, LIBRARY_PACKAGE = "libnuma.so.1", "libnuma1"
# vLLM's CPU build requires these. They are built for another torch and break `import transformers`.
UNFIT = ("torchvision", "torchaudio", "torchcodec")
START = "import torch, transformers, trl, vllm.entrypoints.openai.api_server"
FULL_GB = 0.2  # a disk with less was filled by the installation


class NodeEnvFailed(Exception):
    """The environment could not be made. The message has a remedy."""


@dataclass(frozen=True, slots=True)
class Kind:
    """An environment's kind: the extra of this project, which is also the lock's name, and its size."""

    extra: str
    machine: str
    download_gb: float
    disk_gb: float
    is_disk_measured: bool

    @property
    def lock(self) -> Path:
        return LOCKS / f"{self.extra}.txt"


CPU = Kind("node-cpu", "CPUs", download_gb=1.0, disk_gb=3.6, is_disk_measured=True)
# The wheels of the lock, by `uv pip compile --format pylock.toml`. No GPU machine has unpacked them yet.
CUDA = Kind("node", "NVIDIA GPUs", download_gb=4.1, disk_gb=8.5, is_disk_measured=False)


class State(Enum):
    """The state of an environment's folder."""

    MISSING = auto()
    HALF_MADE = auto()  # its installation was interrupted
    OUTDATED = auto()  # made by another version of this project
    READY = auto()


class ThisMachine:
    """The programs and facts of this computer that the installation depends on."""

    def run(self, argv: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run a program on this terminal; return its exit code."""
        return subprocess.run(argv, env=environment, check=False).returncode

    def output_of(self, argv: Sequence[str]) -> str:
        """Return a program's stdout; nothing if it fails."""
        with contextlib.suppress(OSError):
            done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
            return done.stdout if done.returncode == 0 else ""
        return ""

    def which(self, program: str) -> str | None:
        return shutil.which(program)

    def has_library(self, name: str) -> bool:
        try:
            ctypes.CDLL(name)
        except OSError:
            return False
        return True

    def free_gb(self, folder: Path, /) -> float:
        existing = next(above for above in (folder, *folder.absolute().parents) if above.exists())
        return shutil.disk_usage(existing).free / 1e9

    def platform(self) -> tuple[str, str]:
        return platform.system(), platform.machine()


def python_of(folder: Path) -> Path:
    """Return the path of the environment's Python."""
    return folder / "bin" / "python"


def kind_of(machine: ThisMachine) -> Kind:
    """Return the kind of environment for the machine's hardware."""
    return CUDA if machine.output_of(["nvidia-smi", "-L"]).startswith("GPU ") else CPU


def state_of(folder: Path, made_of: str) -> State:
    """Return the state of an environment that should be made of `made_of`."""
    if not folder.exists():
        return State.MISSING
    try:
        marker = (folder / MADE_OF).read_text("utf-8", "replace")
    except OSError:
        return State.HALF_MADE
    return State.READY if marker == made_of and python_of(folder).exists() else State.OUTDATED


def refuse_unfit(folder: Path, kind: Kind, machine: ThisMachine) -> None:
    """Raise NodeEnvFailed if the environment cannot work on this machine or does not fit on its disk."""
    if (found := machine.platform()) != ("Linux", "x86_64"):
        raise NodeEnvFailed(f"vLLM's packages are for Linux on x86_64, and this is {' on '.join(found)}")
    if kind is CPU and not machine.has_library(LIBRARY):
        raise NodeEnvFailed(
            f"vLLM's CPU build needs {LIBRARY}; install it first, on Debian and Ubuntu with: "
            f"sudo apt-get install {LIBRARY_PACKAGE}"
        )
    if not folder.exists() and (free_gb := machine.free_gb(folder)) < kind.disk_gb:
        raise NodeEnvFailed(
            f"the node environment needs {kind.disk_gb} GB, and {folder} has {free_gb:.1f} GB free"
        )


def make(folder: Path, kind: Kind, package: Sequence[str], made_of: str, machine: ThisMachine) -> None:
    """Make the environment, bring it up to date, or repair it.

    One process at a time installs; a second one waits for it, and uses what it has made.

    Args:
        folder: the environment's; one without a marker is replaced.
        kind: decides which lock is used.
        package: this project with its extras, as arguments of `pip install`.
        made_of: the marker's content.
        machine: runs the programs.

    Raises:
        NodeEnvFailed: it cannot be made; what was downloaded is kept.
    """
    refuse_unfit(folder, kind, machine)
    try:
        with _lock(folder) as is_first:
            if is_first or state_of(folder, made_of) is not State.READY:
                _install(folder, kind, package, machine)
                (folder / MADE_OF).write_text(made_of)
    except KeyboardInterrupt:
        raise NodeEnvFailed("interrupted; the same command continues, with what was downloaded") from None
    except OSError as error:
        raise NodeEnvFailed(f"{error.filename or folder}: {error.strerror}") from None


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock; yield False if another process had it and was waited for. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is installing {folder}; waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
            yield False
        else:
            yield True


def _install(folder: Path, kind: Kind, package: Sequence[str], machine: ThisMachine) -> None:
    if folder.exists() and not (folder / MADE_OF).exists():
        shutil.rmtree(folder)  # half of a package may be installed, which uv would take for whole
    (folder / MADE_OF).unlink(missing_ok=True)
    environment = {**os.environ, **uv_settings(machine, os.environ)}
    uv = _make_empty(folder, machine, environment)
    python = ["--python", str(python_of(folder))]
    install = [uv, "pip", "install", *python, "--constraint", str(kind.lock), *_torch_backend(kind, machine)]
    _run([*install, *package], folder, machine, environment)
    if kind is CPU:
        _run([uv, "pip", "uninstall", "--quiet", *python, *UNFIT], folder, machine, environment)
    # It works, and bytecode is written once: containers often forbid it, and each process would compile its own.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    print("starting it once", file=sys.stderr, flush=True)
    _run([str(python_of(folder)), "-c", START], folder, machine, environment)


def _make_empty(folder: Path, machine: ThisMachine, environment: Mapping[str, str]) -> str:
    """Make an environment without packages unless it exists; return the path of a uv. Raises NodeEnvFailed."""
    uv, own = machine.which("uv"), folder / "bin" / "uv"
    if not folder.exists():
        # With pip, which `setup` of a run.yaml may call.
        make = [uv, "venv", "--quiet", "--seed", "--python"] if uv else []
        argv = [*make, sys.executable] if uv else [sys.executable, "-m", "venv"]
        _run([*argv, str(folder)], folder, machine, environment)
    if uv is None and not own.exists():
        _run([str(python_of(folder)), "-m", "pip", "install", "--quiet", "uv"], folder, machine, environment)
    return uv or str(own)


def _torch_backend(kind: Kind, machine: ThisMachine) -> list[str]:
    """Return uv's option for torch's CPU build. It is not on PyPI, but pip may be configured to find it."""
    if kind is not CPU or "UV_TORCH_BACKEND" in os.environ:
        return []
    versions = machine.output_of([sys.executable, "-m", "pip", "index", "versions", "torch"])
    return [] if "+cpu" in versions else ["--torch-backend", "cpu"]


# pip's options as the variables by which uv takes the same.
UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}


def uv_settings(machine: ThisMachine, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make uv find packages where pip is configured to: uv does not read pip's files.

    A variable of uv that is set already is left alone.
    """
    found: dict[str, str] = {}
    listed = machine.output_of([sys.executable, "-m", "pip", "config", "list"]).splitlines()
    for section in ("global", "install", ":env:"):  # the last one wins
        for line in listed:
            key, _, value = line.partition("=")
            option = key.removeprefix(f"{section}.")
            if option != key and option in UV_NAMES:
                separator = "," if option == "find-links" else " "
                found[UV_NAMES[option]] = separator.join(str(ast.literal_eval(value)).split())
    if "UV_INDEX" in found:
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # as pip: the best version of all indexes
    return {name: value for name, value in found.items() if name not in environment}


def _run(argv: Sequence[str], folder: Path, machine: ThisMachine, environment: Mapping[str, str]) -> None:
    """Run a step of the installation. Raises NodeEnvFailed."""
    exit_code = machine.run(argv, environment)
    if exit_code == 0:
        return
    free_gb = machine.free_gb(folder)
    step = " ".join(Path(part).name if index == 0 else part for index, part in enumerate(argv[:3]))
    why = (
        f"the disk is full ({free_gb:.1f} GB free)" if free_gb < FULL_GB else f"`{step}` failed, as printed above"
    )
    raise NodeEnvFailed(
        f"{folder} is unfinished: {why}; when that is mended, the same command continues, with what was downloaded"
    )


def main() -> None:
    """Make a checkout's environment: the folder, and the extras, the first of which names the lock."""
    folder, extras = Path(sys.argv[1]), sys.argv[2]
    kind = CUDA if extras.split(",")[0] == CUDA.extra else CPU
    try:
        make(folder, kind, ["--editable", f".[{extras}]"], "a checkout", ThisMachine())
    except NodeEnvFailed as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
