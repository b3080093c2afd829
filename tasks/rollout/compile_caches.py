"""Share compile caches of vLLM, Inductor and Triton between similar nodes through the store.

A cache is code, so it is used only if the run's secret vouches for it, for exactly this machine's key (see
`key_of`). A node stores its cache once it serves. A failure costs only a compilation.
"""

from __future__ import annotations

import errno
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
from pathlib import Path
from typing import Any

import structlog
import zstandard
from blake3 import blake3

from grpo_orch.checkpoint.security.vouched import seal, unseal
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import AlreadyExists, Corrupt, StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.tasks.rollout.vllm.flags import base_config, uncompiled_env

log = structlog.get_logger()

# Compressed archives of a folder. They hold code and are authenticated, so their members are not checked.

UNPACKED_BYTES_MAX = 1 << 30  # held in memory, and written in one request
LEVEL = 3
_TEMPORARY = (".lock", ".tmp")  # suffixes of locks and of unfinished files


def pack(folder: Path) -> bytes:
    """Archive the regular files below a folder, without locks and unfinished files. Raises OSError."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    files = [path for path in files if path.suffix not in _TEMPORARY]
    size_bytes = sum(path.stat().st_size for path in files)
    if size_bytes > UNPACKED_BYTES_MAX:
        raise OSError(errno.EFBIG, f"{size_bytes >> 20} MiB; the limit is {UNPACKED_BYTES_MAX >> 20} MiB")
    packed = io.BytesIO()
    with (
        zstandard.ZstdCompressor(LEVEL).stream_writer(packed, closefd=False) as out,
        tarfile.open(fileobj=out, mode="w|") as tar,
    ):
        for path in files:
            tar.add(path, path.relative_to(folder).as_posix(), recursive=False)
    return packed.getvalue()


def unpack(packed: memoryview, folder: Path) -> None:
    """Extract an archive to a new folder atomically. Its parent folder must exist.

    Raises Corrupt for an invalid archive; OSError.
    """
    part = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))  # another engine may do the same
    try:
        with (
            zstandard.ZstdDecompressor().stream_reader(packed) as plain,
            tarfile.open(fileobj=plain, mode="r|") as tar,
        ):
            tar.extractall(part)
        part.rename(folder)
    except (tarfile.TarError, zstandard.ZstdError, EOFError, ValueError) as error:
        raise Corrupt(f"invalid archive: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


# The key of a cache: machines with the same key may share it.
#
# vLLM's and Inductor's own cache keys cover the model's code and configuration. This key adds what they omit: the
# processor, for which C++ is compiled, and all installed packages.

KEY_CHARS = 32
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
SMI_TIMEOUT_S = 30.0  # initializing the driver takes seconds
AMD = Path("/dev/kfd")  # AMD GPU models are not distinguished


def key_of(spec: RunSpec, config: dict[str, Any]) -> str | None:
    """Return the key of this run's cache on this kind of machine; None if that kind is unknown.

    Args:
        config: the config.json of the run's model.
    """
    accelerators = accelerator_models()
    if accelerators is None:
        return None
    machine = {"environment": environment(), "processor": processor(), "accelerators": accelerators}
    run = {
        "model": spec.trainer.model,
        "config": config,
        "flags": spec.rollout.vllm,
        "env": spec.rollout.env,
        "peft": spec.trainer.peft is not None,
    }
    text = json.dumps([machine, run], sort_keys=True, default=str)
    return blake3(text.encode()).hexdigest()[:KEY_CHARS]


@cache
def environment() -> tuple[str, ...]:
    """Return Python's version and prefix, the C library, and all packages' versions, as of the first call."""
    packages = {f"{package.name}=={package.version}" for package in metadata.distributions()}
    return (sys.version, sys.prefix, " ".join(platform.libc_ver()), *sorted(packages))


def processor() -> str:
    """Return the processor's architecture and features: Inductor compiles C++ for the local processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    sets = {line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))}
    features = sorted({feature for names in sets for feature in names.split()})
    return f"{platform.machine()} {' '.join(features)}"


def accelerator_models() -> str | None:
    """Return the models of NVIDIA GPUs with their driver; empty without GPUs; None if they are unknown."""
    if AMD.exists():
        return None
    try:
        listed = subprocess.run(
            NVIDIA_SMI, stdout=subprocess.PIPE, timeout=SMI_TIMEOUT_S, check=True, env=os.environ
        )
    except FileNotFoundError:
        return ""
    except (OSError, subprocess.SubprocessError):
        return None
    return "; ".join(sorted(set(listed.stdout.decode(errors="replace").split("\n")) - {""}))


FOLDERS = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
MODELS = "models"  # links to models' folders, next to the keys


class CompileCaches:
    """This machine's compile caches, by key.

    Args:
        root: folder of all keys. Only this user may write to it. It has the same path on every machine of a kind,
            since compiled code may contain it. A machine's engines share it, like vLLM's own caches.
        spec: the run's spec from run.yaml.
        secret: the run's secret.
    """

    def __init__(self, store: Store, spec: RunSpec, root: Path, secret: str) -> None:
        self._store = store
        self._spec = spec
        self._root = root
        self._secret = secret
        # Folders set by the user take precedence, and on CPUs nothing is compiled with `enforce-eager`.
        named = FOLDERS.keys() & {*spec.rollout.env, *os.environ}
        self._is_enabled = not named and not uncompiled_env(spec)
        self._folder: Path | None = None
        self.is_restored = False  # the cache was compiled by another node, or earlier
        self.is_discarded = False  # vLLM failed with a restored cache
        self._store_key: str | None = None  # set while the cache is to be stored
        self._overwrites = False  # the stored cache is damaged, or vLLM failed with it
        self.restore_s = 0.0

    def restore(self, spec: RunSpec) -> RunSpec:
        """Restore the cache of another node. Returns the run's spec on this machine, with vLLM's environment."""
        if self._is_enabled and self._folder is None:
            self._restore(base_config(spec))
        if self._folder is None:
            return spec
        env = {name: str(self._folder / folder) for name, folder in FOLDERS.items()}
        spec = replace(spec, rollout=replace(spec.rollout, env={**spec.rollout.env, **env}))
        if spec.trainer.model == self._spec.trainer.model:
            return spec
        return replace(spec, trainer=replace(spec.trainer, model=self._linked(spec.trainer.model)))

    def _linked(self, model: str) -> str:
        """Return a link to the model's folder with the same path on all machines: vLLM's keys contain the path."""
        assert self._folder is not None
        link = self._root / MODELS / self._folder.name
        part = link.with_name(f".{os.getpid()}")
        try:
            link.parent.mkdir(exist_ok=True)
            part.unlink(missing_ok=True)
            part.symlink_to(model)
            part.replace(link)
        except OSError as error:
            log.warning("model_link_failed", reason=str(error))
            return model
        return str(link)

    def discard(self) -> None:
        """Discard a restored cache because vLLM failed with it."""
        if self._folder is not None and self.is_restored:
            log.warning("compile_cache_discarded", folder=str(self._folder))
            self.is_restored, self.is_discarded = False, True
            self._store_key, self._overwrites = layout.compiled(self._folder.name), True
            shutil.rmtree(self._folder, ignore_errors=True)

    def store(self) -> None:
        """Store the cache once, unless another node was first. Overwrites a stored cache that does not work."""
        key, self._store_key = self._store_key, None
        if self._folder is None or key is None:
            return
        try:
            packed = pack(self._folder)
            write = self._store.put if self._overwrites else self._store.create
            write(key, seal(self._secret, key, packed))
        except AlreadyExists:  # by another node of this kind, or by this one if the response was lost
            return
        except (StoreError, OSError) as error:
            log.warning("compile_cache_store_failed", reason=str(error))
        else:
            log.info("compile_cache_stored", key=key, bytes=len(packed))

    def _restore(self, config: dict[str, Any]) -> None:
        begun_s = time.monotonic()
        try:
            key = key_of(self._spec, config)
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            key = None
            log.warning("compile_cache_disabled", reason=str(error))
        if key is None:
            self._is_enabled = False
            return
        self._folder = self._root / key
        try:
            self._fetch(key, self._folder)
        except (StoreError, OSError) as error:
            log.warning("compile_cache_restore_failed", reason=str(error))
        self.is_restored = self._folder.exists()  # possibly by another engine of this machine
        self.restore_s = time.monotonic() - begun_s

    def _fetch(self, key: str, folder: Path) -> None:
        """Fetch the stored cache. If there is none, plan to store this machine's. Raises StoreError, OSError."""
        store_key = layout.compiled(key)
        if store_key not in [entry.key for entry in self._store.entries(layout.COMPILED)]:
            self._store_key = store_key
            return
        if folder.exists():
            return
        try:
            sealed = self._store.get_buffer(store_key)
            unpack(unseal(self._secret, store_key, sealed), folder)
        except Corrupt as error:
            log.warning("compile_cache_corrupt", reason=str(error))
            self._store_key, self._overwrites = store_key, True
        else:
            log.info("compile_cache_restored", key=store_key, bytes=len(sealed))
