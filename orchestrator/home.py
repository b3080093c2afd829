"""Where this machine keeps what must not go to the store: secrets, daemon logs, the local cloud's machines."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from blake3 import blake3


def home() -> Path:
    """`$GRPO_ORCH_HOME`, else `grpo-orch` below the XDG state directory."""
    named = os.environ.get("GRPO_ORCH_HOME")
    if named:
        return Path(named).absolute()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser().absolute() / "grpo-orch"


def run_id_of(name: str, store_url: str) -> str:
    """A name for machines and folders: the run's own, and eight hex digits of its store's URL."""
    return f"{re.sub(r'[^a-z0-9-]', '-', name.lower())}-{blake3(store_url.encode()).hexdigest()[:8]}"


def run_dir(run_id: str) -> Path:
    """The run's folder below `home()`, made with access for its owner alone."""
    folder = home() / run_id
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def run_token(run_id: str) -> str:
    """The run's bearer secret, made at the first call on this machine and kept in a file of mode 0600."""
    path = run_dir(run_id) / "token"
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text().strip()
    with os.fdopen(handle, "w") as out:
        out.write(secrets.token_urlsafe(32))
    return path.read_text().strip()


def known_token(run_id: str) -> str | None:
    """The run's secret if this machine has it."""
    path = home() / run_id / "token"
    return path.read_text().strip() if path.exists() else None


def remember_run(store_url: str) -> None:
    """Note the run as this user's latest, for commands that name none."""
    home().mkdir(parents=True, exist_ok=True, mode=0o700)
    (home() / "latest").write_text(store_url)


def latest_run() -> str | None:
    """The store URL of the run that was last started or resumed here."""
    path = home() / "latest"
    return path.read_text().strip() if path.exists() else None
