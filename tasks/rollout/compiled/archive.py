"""A folder of files as one compressed archive and back, neither larger than is allowed."""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

import zstandard

from checkpoint.store.errors import Corrupt

PACKED_BYTES_MAX = 256 << 20  # written in one request, and held in memory once
UNPACKED_BYTES_MAX = 1 << 30
LEVEL = 3
# What compilers write beside their results, and what is still being written.
_PASSING = (".lock", ".tmp")


class TooLarge(Exception):
    """It may not travel."""


def pack(folder: Path) -> bytes:
    """The plain files below a folder, without locks and files that are being written. Raises TooLarge, OSError."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    files = [path for path in files if path.suffix not in _PASSING]
    size_bytes = sum(path.stat().st_size for path in files)
    if size_bytes > UNPACKED_BYTES_MAX:
        raise TooLarge(f"{size_bytes >> 20} MiB where {UNPACKED_BYTES_MAX >> 20} may travel")
    packed = io.BytesIO()
    with (
        zstandard.ZstdCompressor(LEVEL).stream_writer(packed, closefd=False) as out,
        tarfile.open(fileobj=out, mode="w|") as tar,
    ):
        for path in files:
            tar.add(path, path.relative_to(folder).as_posix(), recursive=False)
    if packed.tell() > PACKED_BYTES_MAX:
        raise TooLarge(f"{packed.tell() >> 20} MiB packed where {PACKED_BYTES_MAX >> 20} may travel")
    return packed.getvalue()


def unpack(packed: memoryview, folder: Path) -> None:
    """Write the files of an archive into a folder that is not there yet, which appears once all are written;
    that above it is there.

    Raises Corrupt where it is no such archive, or would leave the folder, or is too large; OSError.
    """
    part = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))  # another engine here may be at it, too
    try:
        with (
            zstandard.ZstdDecompressor().stream_reader(packed) as plain,
            tarfile.open(fileobj=plain, mode="r|") as tar,
        ):
            _write(tar, part)
        part.rename(folder)
    except (tarfile.TarError, zstandard.ZstdError, EOFError, ValueError) as error:
        raise Corrupt(f"no archive of files: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write(tar: tarfile.TarFile, folder: Path) -> None:
    left_bytes = UNPACKED_BYTES_MAX
    for member in tar:
        name = PurePosixPath(member.name)
        left_bytes -= member.size
        if not member.isreg() or name.is_absolute() or ".." in name.parts or left_bytes < 0:
            raise Corrupt(f"{member.name!r} of {member.size} bytes is not to be written")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        source = tar.extractfile(member)
        assert source is not None
        with path.open("wb") as out:
            shutil.copyfileobj(source, out)
