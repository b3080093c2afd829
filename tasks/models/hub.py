"""Fetches a model from the hub into its cache on this machine, and says how far it is.

`python -m tasks.models.hub MODEL [REVISION [CACHE]]` is a process of its own: the hub's client has no end that
another thread could ask for, and reads its settings from the environment. Every second it writes a line.
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

from policies.serving.joining import HUB, Stage, limit_s, makes_progress
from tasks.machine.base_model import FILES, NOT_FILES

TELL_S = 1.0


class NotFetched(Exception):
    """The hub did not give the model; the message says why in a line."""


@dataclass(frozen=True, slots=True)
class Told:
    """A line of the process. The last has `folder` or `error`."""

    done_bytes: int = 0
    total_bytes: int = 0
    folder: str = ""
    error: str = ""


def fetch(
    model: str,
    revision: str | None,
    cache: str | None,
    env: Mapping[str, str],
    say: Callable[[Stage], None],
    limit_of_silence_s: float,
) -> Path:
    """Fetch a model's files for safetensors, unless they are there, and return their folder.

    Args:
        cache: the hub's, if it is not where the environment says.
        env: of the process, HF_TOKEN among it.
        say: told how far it is; what it raises ends the process.
        limit_of_silence_s: how long it may not get on.

    Raises NotFetched.
    """
    argv = [sys.executable, "-m", "tasks.models.hub", model, revision or "", cache or ""]
    process = subprocess.Popen(argv, env=dict(env), stdout=subprocess.PIPE)
    assert process.stdout is not None
    mark, since_s = Stage(HUB), time.monotonic()
    try:
        for line in process.stdout:
            try:
                told = msgspec.json.decode(line, type=Told)
            except (ValueError, RecursionError):  # something installed here speaks whenever Python starts
                continue
            if told.folder:
                return Path(told.folder)
            if told.error:
                raise NotFetched(told.error)
            now = Stage(HUB, told.done_bytes, told.total_bytes)
            say(now)
            if makes_progress(mark, now):
                mark, since_s = now, time.monotonic()
            elif time.monotonic() - since_s > limit_s(now, limit_of_silence_s):
                raise NotFetched(f"no further for {limit_of_silence_s:.0f} s")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    raise NotFetched(f"its process ended with {process.returncode}")


def main(argv: Sequence[str]) -> int:
    model, revision, cache = [*argv, "", ""][:3]
    wanted: dict[str, Any] = {"allow_patterns": FILES, "ignore_patterns": NOT_FILES}
    wanted |= {"revision": revision or None, "cache_dir": cache or None}
    ended = list[Told]()

    def download() -> None:
        from huggingface_hub import snapshot_download

        try:
            ended.append(Told(folder=snapshot_download(model, **wanted)))
        except Exception as error:  # noqa: BLE001  # whatever the hub's client and the disk raise is told in a line
            ended.append(Told(error=" ".join(f"{type(error).__name__}: {error}".split())[:500]))

    count = _counter(model, wanted)
    thread = threading.Thread(target=download, daemon=True)
    thread.start()
    while thread.is_alive():
        _tell(count())
        thread.join(TELL_S)
    _tell(ended[0])
    return 0


def _counter(model: str, wanted: Mapping[str, Any]) -> Callable[[], Told]:
    """Returns how far the download is; nothing where the hub says no sizes: the download says why."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.file_download import repo_folder_name

    try:
        files = snapshot_download(model, dry_run=True, **wanted)
    except (HTTPError, OSError, ValueError, RuntimeError):
        return Told
    total_bytes = sum(file.file_size or 0 for file in files)
    there_bytes = sum(file.file_size or 0 for file in files if file.is_cached)
    cache = Path(wanted["cache_dir"] or constants.HF_HUB_CACHE)
    blobs = cache / repo_folder_name(repo_id=model, repo_type="model") / "blobs"
    before_bytes = _disk_bytes(blobs)
    return lambda: Told(min(total_bytes, there_bytes + _disk_bytes(blobs) - before_bytes), total_bytes)


def _disk_bytes(folder: Path) -> int:
    """What its files take: a file that is begun has its whole size, and not yet its blocks."""
    found = 0
    for path in folder.glob("*"):
        try:
            found += path.stat().st_blocks * 512
        except OSError:  # it was just renamed
            continue
    return found


def _tell(told: Told) -> None:
    try:
        sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # nobody wants it any more; the download's threads end with this process
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
