"""Fetch a model from the hub into this machine's hub cache, and report the progress.

`python -m grpo_orch.tasks.models.hub MODEL [REVISION [CACHE]]` runs as a separate process because another thread
cannot cancel the hub's client, and it reads its settings from the environment. The process writes a line every
second.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from grpo_orch.policies.serving.joining import HUB, Stage, makes_progress, stage_limit_s
from grpo_orch.tasks.machine.base_model import FILES, NOT_FILES

REPORT_S = 1.0


class DownloadFailed(Exception):
    """Raised if the download failed; the message gives the reason in one line."""


@dataclass(frozen=True, slots=True)
class DownloadReport:
    """A line that the process writes. The last one has `folder` or `error`."""

    done_bytes: int = 0
    total_bytes: int = 0
    folder: str = ""
    error: str = ""


def fetch(
    model: str,
    revision: str | None,
    cache: str | None,
    env: Mapping[str, str],
    report_progress: Callable[[Stage], None],
    stall_timeout_s: float,
) -> Path:
    """Fetch a model's safetensors files unless they are cached, and return their folder.

    Args:
        cache: the hub cache, if it differs from the environment's.
        env: environment of the process, including HF_TOKEN.
        report_progress: called with the progress; an exception from it kills the process.
        stall_timeout_s: how long the download may make no progress.

    Raises DownloadFailed.
    """
    argv = [sys.executable, "-m", "grpo_orch.tasks.models.hub", model, revision or "", cache or ""]
    process = subprocess.Popen(argv, env=dict(env), stdout=subprocess.PIPE)
    assert process.stdout is not None
    latest, since_s = Stage(HUB), time.monotonic()
    try:
        for line in process.stdout:
            try:
                report = msgspec.json.decode(line, type=DownloadReport)
            except (ValueError, RecursionError):  # an installed package may print when Python starts
                continue
            if report.folder:
                return Path(report.folder)
            if report.error:
                raise DownloadFailed(report.error)
            stage = Stage(HUB, report.done_bytes, report.total_bytes)
            report_progress(stage)
            if makes_progress(latest, stage):
                latest, since_s = stage, time.monotonic()
            elif time.monotonic() - since_s > stage_limit_s(stage, stall_timeout_s):
                raise DownloadFailed(f"no further for {stall_timeout_s:.0f} s")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    raise DownloadFailed(f"its process ended with {process.returncode}")


def main(argv: Sequence[str]) -> int:
    model, revision, cache = [*argv, "", ""][:3]
    options: dict[str, Any] = {"allow_patterns": FILES, "ignore_patterns": NOT_FILES}
    options |= {"revision": revision or None, "cache_dir": cache or None}
    results = list[DownloadReport]()

    def download() -> None:
        from huggingface_hub import snapshot_download

        try:
            results.append(DownloadReport(folder=snapshot_download(model, **options)))
        except Exception as error:  # noqa: BLE001  # report any error of the hub's client or the disk in one line
            results.append(DownloadReport(error=" ".join(f"{type(error).__name__}: {error}".split())[:500]))

    count = _counter(model, options)
    thread = threading.Thread(target=download, daemon=True)
    thread.start()
    while thread.is_alive():
        _write(count())
        thread.join(REPORT_S)
    _write(results[0])
    return 0


def _counter(model: str, options: Mapping[str, Any]) -> Callable[[], DownloadReport]:
    """Return a function that reports the progress of the download, without sizes if the hub returns none.

    The download then reports the error.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.file_download import repo_folder_name

    try:
        files = snapshot_download(model, dry_run=True, **options)
    except (HTTPError, OSError, ValueError, RuntimeError):
        return DownloadReport
    total_bytes = sum(file.file_size or 0 for file in files)
    cached_bytes = sum(file.file_size or 0 for file in files if file.is_cached)
    cache = Path(options["cache_dir"] or constants.HF_HUB_CACHE)
    blobs = cache / repo_folder_name(repo_id=model, repo_type="model") / "blobs"
    before_bytes = _disk_bytes(blobs)
    return lambda: DownloadReport(min(total_bytes, cached_bytes + _disk_bytes(blobs) - before_bytes), total_bytes)


def _disk_bytes(folder: Path) -> int:
    """Return the disk space of the files. Count blocks: an unfinished file already has its full size."""
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:  # it was just renamed
            continue
    return total


def _write(report: DownloadReport) -> None:
    try:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # the reader is gone; exiting ends the download's threads
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
