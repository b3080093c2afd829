"""Build this project as a wheel from the running packages, so that nodes get exactly the controller's version.

The wheel is assembled from the files of a source checkout or of an installed package, without a build backend,
network or git. The build is reproducible. The wheel's folder is named by its digest, so an edited checkout makes
another wheel under the same version number.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import grpo_orch

PROJECT = "grpo-orch"
PACKAGE = "grpo_orch"
DIGEST_CHARS = 16
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date in a zip file
_WHEEL = "Wheel-Version: 1.0\nGenerator: grpo-orch\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


class NotInstalled(Exception):
    """The project runs from a folder that was never installed, so its requirements are unknown."""


def build_wheel(folder: Path) -> Path:
    """Build the wheel as `folder/DIGEST/grpo_orch-VERSION-py3-none-any.whl` unless it exists; return its path.

    It has the project's extras. Raises NotInstalled.
    """
    stem, data = _assemble()
    target = folder / _name_of(data) / f"{stem}-py3-none-any.whl"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as part:
            part.write(data)
        os.replace(part.name, target)
    return target


@cache
def wheel_digest() -> str:
    """Return the name that `build_wheel` gives the wheel's folder, as of the first call. Raises NotInstalled."""
    return _name_of(_assemble()[1])


def _name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGEST_CHARS]


def _assemble() -> tuple[str, bytes]:
    """Return the wheel's file name up to its tags, and its content. Raises NotInstalled."""
    distribution = _distribution()
    stem = f"{PACKAGE}-{distribution.version}"
    return stem, _zipped(_with_record(_files(distribution, f"{stem}.dist-info"), f"{stem}.dist-info"))


def _distribution() -> metadata.Distribution:
    """Return the installed distribution; a checkout may also hold stale build metadata, which comes second."""
    found = list(metadata.distributions(name=PROJECT))
    if not found:
        raise NotInstalled(f"{PROJECT} is not installed here; install it with `pip install -e .`")
    return next((distribution for distribution in found if distribution.read_text("METADATA")), found[0])


def _files(distribution: metadata.Distribution, info: str) -> dict[str, bytes]:
    """Return the wheel's content by name, without its RECORD."""
    root = Path(grpo_orch.__file__).parent.parent
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in _sources(root)}
    requirements = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    files[f"{info}/METADATA"] = requirements.encode()
    if text := distribution.read_text("licenses/LICENSE"):
        files[f"{info}/licenses/LICENSE"] = text.encode()
    files[f"{info}/WHEEL"] = _WHEEL.encode()
    files[f"{info}/entry_points.txt"] = (distribution.read_text("entry_points.txt") or "").encode()
    return files


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root / PACKAGE, followlinks=True):  # a checkout's packages are links
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _with_record(files: dict[str, bytes], info: str) -> dict[str, bytes]:
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in sorted(files.items())]
    return {**files, f"{info}/RECORD": "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()}


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _zipped(files: dict[str, bytes]) -> bytes:
    """Return an uncompressed zip: compressed bytes depend on the version of zlib."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files, key=lambda name: (".dist-info/" in name, name)):  # wheels put dist-info last
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.create_system = 3  # Unix on every platform: installers read the mode below
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, files[name])
    return buffer.getvalue()
