"""The trainer's checkpoints: its folders into the store, and the newest whole one back."""

from __future__ import annotations

import platform
import shutil
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import structlog

from checkpoint import layout, manifest
from checkpoint.errors import Corrupt, NotFound
from checkpoint.store import Store
from policies.vocabulary import PolicyVersion

log = structlog.get_logger()

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy", "safetensors", "grpo-orch")


def upload_checkpoint(store: Store, folder: Path, at: PolicyVersion, meta: dict[str, str]) -> None:
    """Store a checkpoint folder; it exists once its manifest does. Raises StoreError."""
    began_s = time.monotonic()
    stored = manifest.publish(
        store, layout.checkpoint(at), folder, at, time.time(), {**package_versions(), **meta}
    )
    log.info(
        "checkpoint_stored",
        checkpoint=str(at),
        size_bytes=stored.size_bytes,
        took_s=round(time.monotonic() - began_s, 3),
    )


def restore_newest(store: Store, timeline: int, folder: Path) -> tuple[PolicyVersion, Path] | None:
    """Fetch the newest checkpoint of the timeline whose every file is what was stored.

    Returns its version and its folder, `folder/checkpoint-STEP`; None where the timeline has no such checkpoint.
    Raises StoreError when the store itself fails.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for at in reversed(manifest.committed(store, f"{layout.CHECKPOINTS}/{timeline:04d}")):
        target = folder / f"checkpoint-{at.step}"
        try:
            manifest.fetch(store, layout.checkpoint(at), target)
        except (Corrupt, NotFound) as error:
            log.warning("checkpoint_unusable", checkpoint=str(at), error=str(error), next="the one before it")
            continue
        log.info("checkpoint_restored", checkpoint=str(at))
        return at, target
    return None


def package_versions() -> dict[str, str]:
    """The versions that a checkpoint was made with, by package."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
