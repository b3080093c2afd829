"""What is installed in an environment, held against its lock; packages that are a version and nothing else."""

from __future__ import annotations

import re
import sysconfig
from importlib import metadata
from pathlib import Path

from grpo_orch.tasks.machine.versions import locked_versions

OWN = {"grpo-orch", "pip", "setuptools", "uv", "wheel"}  # ours, and what installs


def not_as_locked(environment: str) -> list[str]:
    """Each package installed here that the lock does not have in that version."""
    locked = locked_versions(environment)
    # Not of all `sys.path`: setuptools puts copies of its own there, once somebody imports `pkg_resources`.
    here = metadata.distributions(path=[sysconfig.get_path("purelib")])
    found = {re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower(): one.version.partition("+")[0] for one in here}
    return [
        f"{name} {version}, not {locked.get(name)}"
        for name, version in sorted(found.items())
        if name not in OWN and locked.get(name) != version
    ]


def install(folder: Path, package: str, version: str) -> None:
    """Make `folder` say that it holds a package."""
    about = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
