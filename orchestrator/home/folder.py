"""Where this machine keeps what must not go to the store: secrets, daemon logs, the local cloud's machines."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from blake3 import blake3

from checkpoint.records.documents import SecretMark

ELSEWHERE = "or name another folder as GRPO_ORCH_HOME"


class HomeUnusable(Exception):
    """What this machine keeps of runs cannot be kept, or read; the message names the file and says what helps."""


def home() -> Path:
    """`$GRPO_ORCH_HOME`, else `grpo-orch` below the XDG state directory. Raises HomeUnusable."""
    named = os.environ.get("GRPO_ORCH_HOME")
    if named:
        return Path(named).absolute()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        return Path(state).expanduser().absolute() / "grpo-orch"
    except RuntimeError:
        raise HomeUnusable("this user has no home; name a folder for what is kept as GRPO_ORCH_HOME") from None


def run_id_of(name: str, store_url: str) -> str:
    """A name for machines and folders: the run's own, and eight hex digits of its store's URL."""
    return f"{re.sub(r'[^a-z0-9-]', '-', name.lower())}-{blake3(store_url.encode()).hexdigest()[:8]}"


def run_dir(run_id: str) -> Path:
    """The run's folder below `home()`, made with access for its owner alone. Raises HomeUnusable."""
    folder = home() / run_id
    with _usable():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def run_token(run_id: str) -> str:
    """The run's bearer secret, made at the first call on this machine and kept in a file of mode 0600.

    Raises HomeUnusable.
    """
    path = token_file(run_id)
    with _usable():
        if not path.exists():
            part = _written(path, secrets.token_urlsafe(32))
            with contextlib.suppress(FileExistsError):  # another process has made it just now
                os.link(part, path)
            part.unlink()
    token = known_token(run_id)
    if not token:  # with which anybody could speak to the run's machines
        raise HomeUnusable(f"{path} is empty; bring the run's from where it was started, or remove it")
    return token


def known_token(run_id: str) -> str | None:
    """The run's bearer secret, or None on a machine that does not have it. Raises HomeUnusable."""
    return _read(run_id, "token")


def token_file(run_id: str) -> Path:
    """Where `run_token` keeps it. To steer a run's machines from elsewhere, bring the file along."""
    return run_dir(run_id) / "token"


def token_mark(token: str) -> SecretMark:
    """What the store may know of a secret of 256 random bits."""
    return SecretMark(blake3(token.encode(), derive_key_context="grpo-orch 2026 a run's secret").hexdigest())


def keep_store_options(store_url: str, options: Mapping[str, str]) -> None:
    """Keep a store's options for commands that name only its URL, in a file of mode 0600; without any, forget."""
    name = _store_file(store_url, "json")
    if options:
        _replace(name, json.dumps(dict(options)))
    elif kept_store_options(store_url):
        with _usable():
            home().joinpath(*name).unlink(missing_ok=True)


def kept_store_options(store_url: str) -> dict[str, str]:
    """What `keep_store_options` kept for that URL on this machine, or nothing. Raises HomeUnusable."""
    options: dict[str, str] = json.loads(_read(*_store_file(store_url, "json")) or "{}")
    return options


def keep_run_digest(store_url: str, digest: str) -> None:
    """Keep the digest of the run.json at that URL. Raises HomeUnusable."""
    _replace(_store_file(store_url, "run"), digest)


def kept_run_digest(store_url: str) -> str | None:
    """What `keep_run_digest` kept on this machine, or None. Raises HomeUnusable."""
    return _read(*_store_file(store_url, "run"))


def run_digest_file(store_url: str) -> Path:
    """Where `keep_run_digest` keeps it."""
    return home().joinpath(*_store_file(store_url, "run"))


def remember_run(store_url: str) -> None:
    """Note the run as this user's latest, for commands that name none. Raises HomeUnusable."""
    _replace(("latest",), store_url)


def latest_run() -> str | None:
    """The store URL of the run that was last started or resumed here. Raises HomeUnusable."""
    return _read("latest") or None


def _store_file(store_url: str, suffix: str) -> tuple[str, str]:
    return "stores", f"{blake3(store_url.encode()).hexdigest(16)}.{suffix}"


def _read(*name: str) -> str | None:
    """The text of a file below `home()`; None where there is none, or no home. Raises HomeUnusable."""
    try:
        path = home().joinpath(*name)
    except HomeUnusable:  # so nothing was ever kept
        return None
    with _usable():
        try:
            return path.read_text("utf-8", "replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None


def _replace(name: tuple[str, ...], text: str) -> None:
    """Write a file below `home()` that its owner alone can read, whole or not at all. Raises HomeUnusable."""
    path = home().joinpath(*name)
    with _usable():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _written(path, text).replace(path)


def _written(path: Path, text: str) -> Path:
    """A file beside `path` that has the text. Raises OSError."""
    part = path.with_suffix(f".{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
            out.write(text)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return part


@contextlib.contextmanager
def _usable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HomeUnusable(f"{error.filename or home()}: {error.strerror}; mend that, {ELSEWHERE}") from None
