"""What vLLM, Inductor and Triton have compiled, from the first node of a kind to those that come after it.

It is code, so it is used only where the run's secret vouches for it, for the very key that this machine has (see
`key_of`). It is put into the store once the node serves. Whatever fails costs a compilation and nothing else.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import structlog
import zstandard
from blake3 import blake3

from checkpoint.security.vouched import MAC_BYTES, seal, unseal
from checkpoint.store import layout
from checkpoint.store.errors import AlreadyExists, Corrupt, StoreError
from checkpoint.store.run_store import Store
from policies.model.spec import RunSpec
from tasks.rollout.vllm.flags import base_config, uncompiled_env

log = structlog.get_logger()

# A folder of files as one compressed archive and back, neither larger than is allowed.

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


# What compiled code depends on: machines on which all of it is the same may use what one of them has compiled.
#
# vLLM and Inductor look into their caches by keys of their own, which cover the model's code and configuration.
# This one covers what they leave out: the processor for which C++ was compiled, and everything that is installed.

KEY_CHARS = 32
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
ASKED_S = 30.0  # a driver that is being initialised takes seconds
AMD = Path("/dev/kfd")  # whose kinds are not told apart here


def key_of(spec: RunSpec, config: dict[str, Any]) -> str | None:
    """Names what is compiled for this run, whose model has that config.json, on machines like this one; None where
    this one's kind is unknown."""
    accelerators = kind_of_accelerators()
    if accelerators is None:
        return None
    on = {"environment": environment(), "processor": processor(), "accelerators": accelerators}
    of = {
        "model": spec.trainer.model,
        "config": config,
        "flags": spec.rollout.vllm,
        "env": spec.rollout.env,
        "peft": spec.trainer.peft is not None,
    }
    text = json.dumps([on, of], sort_keys=True, default=str)
    return blake3(text.encode()).hexdigest()[:KEY_CHARS]


@cache
def environment() -> tuple[str, ...]:
    """Python, where it is, the C library, and each package with its version, as they are at the first call."""
    packages = {f"{one.name}=={one.version}" for one in metadata.distributions()}
    return (sys.version, sys.prefix, " ".join(platform.libc_ver()), *sorted(packages))


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Its architecture and instructions: Inductor compiles C++ for the machine that it runs on."""
    lines = cpuinfo.read_text().splitlines()
    sets = {line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))}
    return f"{platform.machine()} {' '.join(sorted({one for some in sets for one in some.split()}))}"


def kind_of_accelerators() -> str | None:
    """The kinds of NVIDIA GPUs here, with their driver; empty without any; None where they cannot be told."""
    if AMD.exists():
        return None
    try:
        said = subprocess.run(NVIDIA_SMI, stdout=subprocess.PIPE, timeout=ASKED_S, check=True, env=os.environ)
    except FileNotFoundError:
        return ""
    except (OSError, subprocess.SubprocessError):
        return None
    return "; ".join(sorted(set(said.stdout.decode(errors="replace").split("\n")) - {""}))


FOLDERS = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
MODELS = "models"  # links to models' folders, beside the keys
SERVED_S = 60.0  # until it is stored: the first steps compile, too, and go before


class CompileCaches:
    """A machine's folder of compiled code, for each key.

    Args:
        root: where it is: at the same path on every machine of a kind, for compiled code may name its place, and
            nobody else's to write to. Engines on one machine share it, as they do vLLM's own.
        spec: the run's, as its run.yaml has it.
        secret: the run's.
    """

    def __init__(self, store: Store, spec: RunSpec, root: Path, secret: str) -> None:
        self._store = store
        self._spec = spec
        self._root = root
        self._secret = secret
        # Who names such a folder keeps it; and on CPUs `enforce-eager` compiles nothing.
        named = FOLDERS.keys() & {*spec.rollout.env, *os.environ}
        self._on = not named and not uncompiled_env(spec)
        self._folder: Path | None = None
        self.of_others = False  # whether what is there was compiled by others, or earlier
        self.doubted = False  # whether vLLM did not work with that
        self._place: str | None = None  # where it goes in the store
        self._replaces = False  # what is there, which is damaged or with which vLLM did not work
        self._works = True
        self.took_s = 0.0  # to bring it

    def bring(self, spec: RunSpec) -> RunSpec:
        """Bring what others have compiled. Returns the run, as it is here, with vLLM's environment."""
        if self._on and self._folder is None:
            self._bring(base_config(spec))
        if self._folder is None:
            return spec
        env = {name: str(self._folder / one) for name, one in FOLDERS.items()}
        spec = replace(spec, rollout=replace(spec.rollout, env={**spec.rollout.env, **env}))
        if spec.trainer.model == self._spec.trainer.model:
            return spec
        return replace(spec, trainer=replace(spec.trainer, model=self._linked(spec.trainer.model)))

    def _linked(self, model: str) -> str:
        """A path to the model's folder that is the same on all machines, for vLLM's own keys have it in them."""
        assert self._folder is not None
        link = self._root / MODELS / self._folder.name
        part = link.with_name(f".{os.getpid()}")
        try:
            link.parent.mkdir(exist_ok=True)
            part.unlink(missing_ok=True)
            part.symlink_to(model)
            part.replace(link)
        except OSError as error:
            log.warning("model_not_linked", why=str(error))
            return model
        return str(link)

    def doubt(self) -> None:
        """vLLM did not work with what is here: of what others have compiled nothing is used any more."""
        if self._folder is not None and self.of_others:
            log.warning("compiled_not_used", folder=str(self._folder))
            self.of_others, self.doubted, self._works = False, True, False
            self._place, self._replaces = layout.compiled(self._folder.name), True
            shutil.rmtree(self._folder, ignore_errors=True)

    def works(self) -> None:
        """vLLM works with what is here now."""
        self._works = True

    async def keep(self, serves: asyncio.Event) -> None:
        """Store what is compiled here if nobody else has, whenever the node has served for a while."""
        while True:
            await serves.wait()
            serves.clear()
            await asyncio.sleep(SERVED_S)
            await asyncio.to_thread(self.store)
            self._place = None  # what could not be stored is not packed again and again

    def store(self) -> None:
        """Store what is compiled here, in place of what does not work, else unless another has been first."""
        if self._folder is None or self._place is None or not self._works:
            return
        try:
            packed = pack(self._folder)
            write = self._store.put if self._replaces else self._store.create
            write(self._place, seal(self._secret, self._place, packed))
        except AlreadyExists:  # another node of this kind, or this one, whose answer was lost
            self._place = None
        except (TooLarge, StoreError, OSError) as error:
            log.warning("compiled_not_stored", why=str(error))
        else:
            log.info("compiled_stored", place=self._place, bytes=len(packed))
            self._place = None

    def _bring(self, config: dict[str, Any]) -> None:
        begun_s = time.monotonic()
        try:
            key = key_of(self._spec, config)
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            key = None
            log.warning("compiled_not_kept", why=str(error))
        if key is None:
            self._on = False
            return
        self._folder = self._root / key
        try:
            self._look(key, self._folder)
        except (StoreError, OSError) as error:
            log.warning("compiled_not_brought", why=str(error))
        self.of_others = self._folder.exists()  # also where another engine here was quicker
        self.took_s = time.monotonic() - begun_s

    def _look(self, key: str, folder: Path) -> None:
        """Bring what others have stored, or have what is compiled here stored. Raises StoreError, OSError."""
        place = layout.compiled(key)
        sizes = {entry.key: entry.size_bytes for entry in self._store.entries(layout.COMPILED)}
        if place not in sizes:
            self._place = place
            return
        if folder.exists():
            return
        try:
            if sizes[place] > PACKED_BYTES_MAX + MAC_BYTES:
                raise Corrupt(f"{place}: {sizes[place]} bytes")
            unpack(unseal(self._secret, place, self._store.get_buffer(place)), folder)
        except Corrupt as error:
            log.warning("compiled_not_ours", why=str(error))
            self._place, self._replaces = place, True
        else:
            log.info("compiled_brought", place=place, bytes=sizes[place])
