"""State of runs that stays on this machine and never goes to the store: secrets, logs, digests of each run.json.

In this order: the files, secrets for the code on a run's machines, and trust in the store's run.json. Secrets come
from the environment of the user who starts or resumes the run and are written nowhere; only the names listed in
run.yaml are stored.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from blake3 import blake3

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord, SecretMark
from grpo_orch.checkpoint.security import vouched
from grpo_orch.checkpoint.security.redaction import NAMES_ENV
from grpo_orch.checkpoint.security.vouched import UntrustedRun
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.spec import RunSpec, datasets_of
from grpo_orch.policies.model.vocabulary import Role

ELSEWHERE = "or set GRPO_ORCH_HOME to another folder"


class HomeUnusable(Exception):
    """A file below `home()` cannot be read or written. The message names the file and a remedy."""


def home() -> Path:
    """Return `$GRPO_ORCH_HOME`, else `grpo-orch` below the XDG state directory. Raises HomeUnusable."""
    named = os.environ.get("GRPO_ORCH_HOME")
    if named:
        return Path(named).absolute()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        return Path(state).expanduser().absolute() / "grpo-orch"
    except RuntimeError:
        raise HomeUnusable("this user has no home folder; set GRPO_ORCH_HOME to a folder") from None


def run_id_of(name: str, store_url: str) -> str:
    """Return an id for machines and folders: the run's name and eight hex digits of its store URL's hash."""
    return f"{re.sub(r'[^a-z0-9-]', '-', name.lower())}-{blake3(store_url.encode()).hexdigest()[:8]}"


def run_dir(run_id: str) -> Path:
    """Return the run's folder below `home()`; create it with mode 0700. Raises HomeUnusable."""
    folder = home() / run_id
    with _usable():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def run_token(run_id: str) -> str:
    """Return the run's bearer secret; create it on the first call, in a file of mode 0600. Raises HomeUnusable."""
    path = token_file(run_id)
    with _usable():
        if not path.exists():
            part = _write_part(path, secrets.token_urlsafe(32))
            with contextlib.suppress(FileExistsError):  # another process has just created it
                os.link(part, path)
            part.unlink()
    token = known_token(run_id)
    if not token:  # the run's machines would accept an empty secret from anyone
        raise HomeUnusable(f"{path} is empty; copy it from the machine that started the run, or remove it")
    return token


def known_token(run_id: str) -> str | None:
    """Return the run's bearer secret; None if this machine does not have it. Raises HomeUnusable."""
    return _read(run_id, "token")


def token_file(run_id: str) -> Path:
    """Return the file of `run_token`. Copy it to control the run's machines from another machine."""
    return run_dir(run_id) / "token"


def token_mark(token: str) -> SecretMark:
    """Return a hash of the secret that may be stored publicly, because the secret has 256 random bits."""
    return SecretMark(blake3(token.encode(), derive_key_context="grpo-orch 2026 a run's secret").hexdigest())


def save_store_options(store_url: str, options: Mapping[str, str]) -> None:
    """Save a store's options for commands that name only its URL, in a file of mode 0600; {} deletes the file."""
    name = _store_file(store_url, "json")
    if options:
        _replace(name, json.dumps(dict(options)))
    elif saved_store_options(store_url):
        with _usable():
            home().joinpath(*name).unlink(missing_ok=True)


def saved_store_options(store_url: str) -> dict[str, str]:
    """Return the options saved by `save_store_options` for that URL, or {}. Raises HomeUnusable."""
    options: dict[str, str] = json.loads(_read(*_store_file(store_url, "json")) or "{}")
    return options


def save_run_digest(store_url: str, digest: str) -> None:
    """Save the digest of the run.json at that URL. Raises HomeUnusable."""
    _replace(_store_file(store_url, "run"), digest)


def saved_run_digest(store_url: str) -> str | None:
    """Return the digest saved by `save_run_digest`, or None. Raises HomeUnusable."""
    return _read(*_store_file(store_url, "run"))


def run_digest_file(store_url: str) -> Path:
    """Return the file of `save_run_digest`."""
    return home().joinpath(*_store_file(store_url, "run"))


def remember_run(store_url: str) -> None:
    """Save the run as this user's latest, for commands without a target. Raises HomeUnusable."""
    _replace(("latest",), store_url)


def latest_run() -> str | None:
    """Return the store URL of the run last started or resumed here, or None. Raises HomeUnusable."""
    return _read("latest") or None


def _store_file(store_url: str, suffix: str) -> tuple[str, str]:
    return "stores", f"{blake3(store_url.encode()).hexdigest(16)}.{suffix}"


def _read(*name: str) -> str | None:
    """Return the text of a file below `home()`; None without the file or a home. Raises HomeUnusable."""
    try:
        path = home().joinpath(*name)
    except HomeUnusable:  # nothing was ever saved
        return None
    with _usable():
        try:
            return path.read_text("utf-8", "replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None


def _replace(name: tuple[str, ...], text: str) -> None:
    """Write a file of mode 0600 below `home()` atomically. Raises HomeUnusable."""
    path = home().joinpath(*name)
    with _usable():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_part(path, text).replace(path)


def _write_part(path: Path, text: str) -> Path:
    """Write the text to a new file next to `path`, and return that file. Raises OSError."""
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
        raise HomeUnusable(f"{error.filename or home()}: {error.strerror}; fix that, {ELSEWHERE}") from None


# Secrets of a run's machines, such as HF_TOKEN: their names and values.

HUB = ("HF_TOKEN",)
# Credentials of metrics services, by their names in `grpo.report_to`. `secrets` need not list them.
SINKS: dict[str, tuple[str, ...]] = {
    "wandb": ("WANDB_API_KEY",),
    "comet_ml": ("COMET_API_KEY",),
    "mlflow": ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
    "neptune": ("NEPTUNE_API_TOKEN",),
    "clearml": ("CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY"),
    "dagshub": ("DAGSHUB_USER_TOKEN",),
    "swanlab": ("SWANLAB_API_KEY",),
    "trackio": HUB,
}


def default_secrets(spec: RunSpec, role: Role) -> list[str]:
    """Return the secrets that a role usually needs for the run's models, datasets and metrics services."""
    hub = _is_of_hub(spec.trainer.model, spec)
    if role is Role.ROLLOUT:
        return list(HUB if hub else ())
    data = (*datasets_of(spec.trainer.dataset), *datasets_of(spec.trainer.eval_dataset))
    hub = hub or any(dataset.path and _is_of_hub(dataset.path, spec) for dataset in data)
    hub = hub or any("/" in name and _is_of_hub(name, spec) for name in spec.trainer.reward_funcs)
    names = list(HUB if hub else ())
    for sink in _sinks(spec):
        names += SINKS.get(sink, ())
    return list(dict.fromkeys(names))


def secrets_for(spec: RunSpec, role: Role, environment: Mapping[str, str]) -> dict[str, str]:
    """Return a role's secrets that the environment has: those listed in run.yaml, and the default ones."""
    names = dict.fromkeys((*spec.secrets, *default_secrets(spec, role)))
    return {name: environment[name] for name in names if environment.get(name)}


def secret_environment(secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that pass the secrets to a machine, with a list of their names."""
    return {**secrets, NAMES_ENV: ",".join(secrets)} if secrets else {}


def all_secrets(spec: RunSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets of every role and of the daemon."""
    found = {name: value for role in Role for name, value in secrets_for(spec, role, environment).items()}
    return found | notify_urls(spec, environment)


def notify_urls(spec: RunSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the URLs that the daemon sends notifications to, by variable. No machine of the run receives them."""
    return {name: environment[name] for name in spec.notify.url_env if environment.get(name)}


def missing_secrets(spec: RunSpec, environment: Mapping[str, str]) -> str:
    """Return a message that names the unset variables; empty if all are set."""
    names = [name for name in spec.secrets if not environment.get(name)]
    if not names:
        return ""
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(names)} {verb} not set here, but listed in `secrets` of run.yaml"


def _sinks(spec: RunSpec) -> list[str]:
    wanted = spec.grpo.get("report_to") or ()
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    return list(SINKS) if "all" in names else names


def _is_of_hub(name: str, spec: RunSpec) -> bool:
    """Return whether a model or dataset is on the hub, because no such file or folder exists here."""
    return not name.startswith(("/", "./", "../", "~")) and not Path(spec.workdir, name).exists()


# Trust in a run.json. A machine that has started or controlled a run keeps a digest of its run.json outside the
# store. A machine that sees a run for the first time checks it with the run's secret if it has that; else `resume`
# trusts the store once.

DIGEST_ENV = "GRPO_ORCH_RUN_DIGEST"  # set on a controller machine by the machine that launches it


def known_run(store: Store) -> tuple[RunRecord, bytes]:
    """Return the store's run and its bytes. Raises UntrustedRun if they were changed, and StoreError."""
    data = documents.run_bytes(store)
    record = documents.decode_run(store, data)
    kept = saved_run_digest(store.url) or os.environ.get(DIGEST_ENV)
    if kept:
        is_known = kept == run_digest(data)
    else:
        token = known_token(record.run_id)
        is_own = token is not None and documents.SECRET_MARK.read(store) == token_mark(token)
        is_known = token is None or not is_own or vouched.matches(store, token, data) is not False
    if not is_known:
        problem, hint = vouched.changed(store)
        new_run = f"; if you have put another run there, remove {run_digest_file(store.url)}"
        raise UntrustedRun(problem, hint + (new_run if kept else ""))
    return record, data


def sign_run(store: Store, token: str, data: bytes) -> None:
    """Vouch for the run to its machines, and save its digest here. Raises StoreError."""
    vouched.sign_run(store, token, data)
    save_run_digest(store.url, run_digest(data))


def run_digest(data: bytes) -> str:
    """Return the digest by which a machine recognises a run.json."""
    return blake3(data).hexdigest()
