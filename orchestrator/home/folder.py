"""Where this machine keeps what must not go to the store: secrets, daemon logs, the local cloud's machines."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

from checkpoint.records.documents import SecretMark


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
    path = token_file(run_id)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text().strip()
    with os.fdopen(handle, "w") as out:
        out.write(secrets.token_urlsafe(32))
    return path.read_text().strip()


def known_token(run_id: str) -> str | None:
    """The run's bearer secret, or None on a machine that does not have it."""
    path = token_file(run_id)
    return path.read_text().strip() if path.exists() else None


def token_file(run_id: str) -> Path:
    """Where `run_token` keeps it. To steer a run's machines from elsewhere, bring the file along."""
    return run_dir(run_id) / "token"


def token_mark(token: str) -> SecretMark:
    """What the store may know of a secret of 256 random bits."""
    return SecretMark(blake3(token.encode(), derive_key_context="grpo-orch 2026 a run's secret").hexdigest())


def keep_store_options(store_url: str, options: Mapping[str, str]) -> None:
    """Keep a store's options for commands that name only its URL, in a file of mode 0600; without any, forget."""
    path = _options_file(store_url)
    if not options:
        path.unlink(missing_ok=True)
        return
    _replace(path, json.dumps(dict(options)))


def kept_store_options(store_url: str) -> dict[str, str]:
    """What `keep_store_options` kept for that URL on this machine, or nothing."""
    path = _options_file(store_url)
    options: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return options


def keep_run_digest(store_url: str, digest: str) -> None:
    """Keep the digest of the run.json at that URL."""
    _replace(run_digest_file(store_url), digest)


def kept_run_digest(store_url: str) -> str | None:
    """What `keep_run_digest` kept on this machine, or None."""
    path = run_digest_file(store_url)
    return path.read_text().strip() if path.exists() else None


def run_digest_file(store_url: str) -> Path:
    """Where `keep_run_digest` keeps it."""
    return _store_file(store_url, "run")


def _options_file(store_url: str) -> Path:
    return _store_file(store_url, "json")


def _store_file(store_url: str, suffix: str) -> Path:
    return home() / "stores" / f"{blake3(store_url.encode()).hexdigest(16)}.{suffix}"


def _replace(path: Path, text: str) -> None:
    """Write a file that its owner alone can read, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_suffix(f".{secrets.token_hex(4)}")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(text)
    part.replace(path)


def remember_run(store_url: str) -> None:
    """Note the run as this user's latest, for commands that name none."""
    home().mkdir(parents=True, exist_ok=True, mode=0o700)
    (home() / "latest").write_text(store_url)


def latest_run() -> str | None:
    """The store URL of the run that was last started or resumed here."""
    path = home() / "latest"
    return path.read_text().strip() if path.exists() else None
