"""What this machine keeps of runs and never goes to the store: secrets, logs, digests of each run.json.

The files come first, then the secrets that the code on a run's machines needs, then whether the run.json in the
store is the one that this machine knows. Secrets are read from the environment of the user who starts or resumes
the run and are written nowhere; only the names that run.yaml lists are stored.
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

from checkpoint.records import documents
from checkpoint.records.documents import RunRecord, SecretMark
from checkpoint.security import vouched
from checkpoint.security.redaction import NAMES_ENV
from checkpoint.security.vouched import NotVouched
from checkpoint.store.run_store import Store
from policies.model.spec import RunSpec, datasets_of
from policies.model.vocabulary import Role

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


# Secrets of a run's machines, such as HF_TOKEN: which they are, and their values.

HUB = ("HF_TOKEN",)
# What the trainer's sinks log in with, by the word for them in `grpo.report_to`; it need not be named.
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


def usual(spec: RunSpec, role: Role) -> list[str]:
    """What a role needs, as a rule, for the models, data and sinks that the run names."""
    hub = _is_of_hub(spec.trainer.model, spec)
    if role is Role.ROLLOUT:
        return list(HUB if hub else ())
    data = (*datasets_of(spec.trainer.dataset), *datasets_of(spec.trainer.eval_dataset))
    hub = hub or any(one.path and _is_of_hub(one.path, spec) for one in data)
    hub = hub or any("/" in one and _is_of_hub(one, spec) for one in spec.trainer.reward_funcs)
    names = list(HUB if hub else ())
    for sink in _sinks(spec):
        names += SINKS.get(sink, ())
    return list(dict.fromkeys(names))


def secrets_for(spec: RunSpec, role: Role, environment: Mapping[str, str]) -> dict[str, str]:
    """The secrets of a role, as far as the environment has them: those that run.yaml names, and the usual ones."""
    names = dict.fromkeys((*spec.secrets, *usual(spec, role)))
    return {name: environment[name] for name in names if environment.get(name)}


def handed_on(secrets: Mapping[str, str]) -> dict[str, str]:
    """The secrets as a machine's environment has them, with the list of their names."""
    return {**secrets, NAMES_ENV: ",".join(secrets)} if secrets else {}


def all_secrets(spec: RunSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Those of every role, and the daemon's own."""
    found = {name: value for role in Role for name, value in secrets_for(spec, role, environment).items()}
    return found | notify_urls(spec, environment)


def notify_urls(spec: RunSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the URLs that the daemon sends notifications to, by variable. No machine of the run receives them."""
    return {name: environment[name] for name in spec.notify.url_env if environment.get(name)}


def missing(spec: RunSpec, environment: Mapping[str, str]) -> str:
    """What is wrong with the environment, in a line that names the variables; empty where nothing is."""
    names = [name for name in spec.secrets if not environment.get(name)]
    if not names:
        return ""
    verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
    return f"{', '.join(names)} {verb} not set here, and `secrets` of run.yaml names {them}"


def _sinks(spec: RunSpec) -> list[str]:
    wanted = spec.grpo.get("report_to") or ()
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    return list(SINKS) if "all" in names else names


def _is_of_hub(name: str, spec: RunSpec) -> bool:
    """Whether a model's or a dataset's name is one on the hub: no such folder or file is at hand."""
    return not name.startswith(("/", "./", "../", "~")) and not Path(spec.workdir, name).exists()


# Trust in a run.json. A machine that has started or steered a run keeps a digest of its run.json, where the
# store cannot reach it. A machine that sees a run for the first time checks it with the run's secret, if it has
# that; else `resume` trusts the store once.

DIGEST_ENV = "GRPO_ORCH_RUN_DIGEST"  # set for a controller machine by whoever launches it


def known_run(store: Store) -> tuple[RunRecord, bytes]:
    """Return the run in the store, and its bytes. Raises NotVouched, StoreError."""
    data = documents.run_bytes(store)
    record = documents.decode_run(store, data)
    kept = kept_run_digest(store.url) or os.environ.get(DIGEST_ENV)
    if kept:
        known = kept == run_digest(data)
    else:
        token = known_token(record.run_id)
        own = token is not None and documents.SECRET_MARK.read(store) == token_mark(token)
        known = token is None or not own or vouched.matches(store, token, data) is not False
    if not known:
        what, hint = vouched.changed(store)
        another = f"; if it is another run, of which you know, remove {run_digest_file(store.url)}"
        raise NotVouched(what, hint + (another if kept else ""))
    return record, data


def vouch(store: Store, token: str, data: bytes) -> None:
    """Vouch for the run to its machines, and recognise it from now on. Raises StoreError."""
    vouched.vouch(store, token, data)
    keep_run_digest(store.url, run_digest(data))


def run_digest(data: bytes) -> str:
    """By this a machine recognises a run.json."""
    return blake3(data).hexdigest()
