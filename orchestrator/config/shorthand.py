"""Expand the shorthands of run.yaml to RunSpec's shape: datasets, replicas, paths, storage.

Relative paths start at the folder of the file, not at the working directory.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from grpo_orch.orchestrator.config.document import OPTIONS, Document
from grpo_orch.orchestrator.config.problems import Findings, KeyPath, did_you_mean, unknown_key
from grpo_orch.orchestrator.config.structure import format_value
from grpo_orch.policies.model.datasets import FILE_KINDS


def absolute(text: str, workdir: Path) -> Path:
    """Return an absolute path. Expands `~` but not another user's home; never raises."""
    path = Path(text)
    if path.parts[:1] == ("~",):
        path = Path.home().joinpath(*path.parts[1:])
    # Not `resolve`: a link's target may change, and the user knows the path by this name.
    return Path(os.path.normpath(workdir / path))


SHELL_WORDS = re.compile(r"[^\s\"'`=;:|&()<>]+")


@dataclass(frozen=True, slots=True)
class _Context:
    """The file's context for its paths."""

    workdir: Path
    findings: Findings
    is_sky: bool
    setup: str  # the trainer's script


# The tables of shorthands, which `json_schema` reads too.
TEXT_FOR_LIST: tuple[KeyPath, ...] = (  # one item instead of a list
    ("secrets",),
    ("notify", "url_env"),
    ("notify", "command"),
    ("trainer", "reward_funcs"),
    ("trainer", "tools"),
)
# The value of this key, instead of a section.
VALUE_FOR_SECTION: dict[KeyPath, tuple[type, tuple[str, ...]]] = {
    ("trainer", "agent"): (str, ("run",)),
    ("trainer", "dataset"): (str, ("path",)),
    ("trainer", "eval_dataset"): (str, ("path",)),
    ("rollout", "replicas"): (int, ("min", "max")),
}
ENVIRONMENTS: tuple[KeyPath, ...] = (("trainer", "env"), ("rollout", "env"))  # numbers instead of strings


def expand(document: Document, workdir: Path, findings: Findings) -> None:
    """Expand the document's data to the shape of `policies.model.spec.RunSpec`, in place."""
    data = document.data
    for path in TEXT_FOR_LIST:
        section = section_at(data, path[:-1])
        if isinstance(section.get(path[-1]), str):
            section[path[-1]] = [section[path[-1]]]
    for path in VALUE_FOR_SECTION:
        section = section_at(data, path[:-1])
        if path[-1] in section:
            section[path[-1]] = _in_full(section[path[-1]], path)
    for path in ENVIRONMENTS:
        _expand_env(section_at(data, path), path, document.texts)
    replicas = section_at(data, ("rollout", "replicas"))
    if replicas.get("min") is not None and replicas.get("max") is None:
        replicas["max"] = replicas["min"]
    trainer = section_at(data, ("trainer",))
    setup = trainer.get("setup")
    is_sky = data.get("cloud") == "sky"
    _expand_trainer(trainer, _Context(workdir, findings, is_sky, setup if isinstance(setup, str) else ""))


def section_at(data: Any, path: KeyPath) -> dict[Any, Any]:
    """Return the mapping at the path; an empty one if the file does not have it."""
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}


def _in_full(value: Any, path: KeyPath) -> Any:
    """Return the section that a shorthand stands for, or a list of such sections; any other value unchanged."""
    kind, keys = VALUE_FOR_SECTION[path]
    if isinstance(value, list):
        return [_in_full(item, path) for item in value]
    return dict.fromkeys(keys, value) if isinstance(value, kind) and not isinstance(value, bool) else value


def _expand_trainer(trainer: dict[str, Any], context: _Context) -> None:
    if isinstance(rewards := trainer.get("reward_funcs"), list):
        for index, reward in enumerate(rewards):
            if isinstance(reward, str) and "/" in reward:  # a model
                path: KeyPath = ("trainer", "reward_funcs", index)
                rewards[index] = _expand_path(reward, path, (), context)
    if isinstance(trainer.get("model"), str):
        trainer["model"] = _expand_path(trainer["model"], ("trainer", "model"), (), context)
    for key in ("dataset", "eval_dataset"):
        if isinstance(value := trainer.get(key), list):
            for index, dataset in enumerate(value):
                _expand_dataset(dataset, ("trainer", key, index), context)
        else:
            _expand_dataset(value, ("trainer", key), context)


def _expand_dataset(dataset: Any, path: KeyPath, context: _Context) -> None:
    if isinstance(dataset, dict) and isinstance(dataset.get("path"), str):
        dataset["path"] = _expand_path(dataset["path"], (*path, "path"), tuple(FILE_KINDS), context)


def _expand_env(env: dict[str, Any], path: KeyPath, texts: dict[KeyPath, str]) -> None:
    """Replace numbers and booleans by their text in the file, as in `OMP_NUM_THREADS: 1`."""
    for name, value in env.items():
        if isinstance(value, bool | int | float):
            env[name] = texts[(*path, name)]


def _expand_path(text: str, path: KeyPath, suffixes: tuple[str, ...], context: _Context) -> str:
    """Make the path of a folder, or of a file with one of `suffixes`, absolute; keep names on the hub.

    With `cloud: sky` absolute paths are paths on the machines and stay as they are.
    """
    local_path, findings = absolute(text, context.workdir), context.findings
    if not text:
        findings.add(path, "is empty; expected a name on the hub, or a path")
        return text
    if context.is_sky and text.startswith(("/", "~")):
        if text.startswith("~"):
            findings.add(path, "~ differs on other machines; expected an absolute or relative path")
        return text
    if os.path.isdir(local_path) or (os.path.isfile(local_path) and local_path.name.endswith(suffixes)):
        return text if context.is_sky else str(local_path)
    if os.path.isfile(local_path):
        expected = f"a folder or a file that ends in {', '.join(suffixes)}" if suffixes else "a folder"
        findings.add(path, f"{local_path} is a file; expected {expected}")
    elif text.startswith(("/", "./", "../", "~")) or (suffixes and text.endswith(suffixes)):
        if _is_made_by_setup(local_path, context):
            return str(local_path)
        message = f"no such file or folder: {local_path}; relative paths start at the folder of this file"
        findings.add(path, message)
    return text


def _is_made_by_setup(path: Path, context: _Context) -> bool:
    """Return whether the trainer's `setup` on this machine may make the path: it mentions it or a parent."""
    words = {os.path.normpath(context.workdir / word) for word in SHELL_WORDS.findall(context.setup)}
    candidates = [candidate for candidate in (path, *path.parents) if context.workdir in candidate.parents]
    return not context.is_sky and any(str(candidate) in words for candidate in candidates)


# `storage`: the run's store and its client's options. Options may hold secrets: only the processes that use the
# store get them. RunSpec has the URL only, and no message quotes an option.

STORAGE_KEYS = ("url", "options")
EXPECTED_STORE = "expected a folder or a URL, as in s3://bucket/my-run"
PASSWORD = "a password in the URL would be stored with the run; set it in storage.options instead"
_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*$")
_MISSING_SLASHES = re.compile(r"^(file|s3|gs|az):")


@dataclass(frozen=True, slots=True)
class Storage:
    """A store in run.yaml. `options` are its client's; None if the user sets only a URL."""

    url: str
    options: dict[str, str] | None = field(default=None, repr=False)  # may hold secrets


def expand_storage(document: Document, workdir: Path, findings: Findings) -> dict[str, str]:
    """Replace `storage` by its URL, in place, and return the options."""
    data = document.data
    storage = data.get("storage")
    is_sky = data.get("cloud") == "sky"
    if isinstance(storage, str):
        data["storage"] = _url(storage, ("storage",), workdir, findings, is_sky=is_sky)
        return {}
    if not isinstance(storage, dict):
        if "storage" in data:
            findings.add(("storage",), f"{EXPECTED_STORE}, or a mapping with the keys {', '.join(STORAGE_KEYS)}")
        return {}
    for key in storage.keys() - set(STORAGE_KEYS):
        findings.add(("storage", key), unknown_key(key, STORAGE_KEYS))
    url = storage.get("url")
    if isinstance(url, str):
        data["storage"] = _url(url, ("storage", "url"), workdir, findings, is_sky=is_sky)
    else:
        if "url" in storage:
            findings.add(("storage", "url"), EXPECTED_STORE)
        else:
            findings.missing(("storage", "url"), f"missing; {EXPECTED_STORE}")
        data["storage"] = ""  # the problem was reported
    return _options(storage.get("options"), document.texts, findings)


def _options(options: Any, texts: dict[KeyPath, str], findings: Findings) -> dict[str, str]:
    """Return each option as a string. Numbers keep their spelling: an account may be called 0123."""
    if options is None:
        return {}
    if not isinstance(options, dict):
        findings.add(OPTIONS, "expected a mapping of the store client's options, as in {region: eu-west-1}")
        return {}
    strings = {}
    for name, value in options.items():
        match value:
            case bool():
                strings[name] = "true" if value else "false"
            case str() | int() | float():
                strings[name] = texts[(*OPTIONS, name)]
            case _:
                findings.add((*OPTIONS, name), "expected a string, a number, true or false")
    return strings


def _url(url: str, path: KeyPath, workdir: Path, findings: Findings, *, is_sky: bool) -> str:
    """Turn `./run`, `/data/run` and `file://./run` into `file:///...`; keep other URLs."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "file", url
    if problem := _url_problem(url, scheme, rest):
        findings.add(path, problem)
    elif scheme != "file":
        return url.rstrip("/")
    elif is_sky:
        message = (
            "other machines cannot reach a folder on this one; with cloud: sky, expected s3://, gs:// or az://"
        )
        findings.add(path, message)
    elif not is_text(file_url := f"file://{absolute(rest, workdir)}"):
        findings.add(path, f"{file_url!a} is not valid UTF-8; expected a folder with a UTF-8 name")
    else:
        return file_url
    return url


def _url_problem(url: str, scheme: str, rest: str) -> str:
    """Return a syntax problem of a store's URL, or an empty string. The store checks if the scheme is known."""
    if "://" not in url and (match := _MISSING_SLASHES.match(url)):
        return f"neither a folder nor a URL; expected {match[1]}:// and a path"
    if url.startswith("//"):
        return f"the URL scheme before // is missing; {EXPECTED_STORE}"
    if scheme == "memory":
        return f"memory:// is lost when its process ends; {EXPECTED_STORE}"
    if not _SCHEME.match(scheme):
        return f"invalid URL scheme before ://; {EXPECTED_STORE}"
    if not rest.strip("/ "):
        return f"the folder or bucket is missing; {EXPECTED_STORE}"
    if reserved := [char for char in "?#%\\" if char in rest]:
        return f"{reserved[0]!r} is reserved in URLs; expected a path without it"
    if scheme != "file" and has_password(url):
        return PASSWORD
    return ""


def is_text(url: str) -> bool:
    """Return whether a store's URL is valid Unicode. In paths, Python uses surrogates for undecodable bytes."""
    return not any("\ud800" <= char <= "\udfff" for char in url)


def has_password(url: str) -> bool:
    """Return whether a store's URL contains a password."""
    try:
        return urlsplit(url).password is not None
    except ValueError:  # brackets without an address
        return False


# `rehearse.faults`: the targets of each kind of fault.

TARGETS = {
    "kill": ("rollout-N", "rollouts", "trainer", "trainer-0", "gateway", "daemon"),
    "preempt": ("rollout-N", "rollouts", "trainer-0"),
    "no_capacity": ("rollout-N", "rollouts", "trainer-0"),
}
NODE = re.compile(r"^rollout-(0|[1-9][0-9]{0,5})$")


def target_problem(kind: str, target: str, replicas_max: int) -> str:
    """Return the problem with a fault's target, or an empty string; nodes are numbered below `replicas_max`."""
    node = NODE.match(target)
    if replicas_max == 0 and (node or target == "rollouts"):
        return "there are no rollout nodes: rollout.replicas is 0"
    if node and int(node[1]) >= replicas_max:
        return f"there is no {target}; the last node is rollout-{replicas_max - 1} (rollout.replicas.max)"
    if node or (target in TARGETS[kind] and target != "rollout-N"):
        return ""
    expected = "expected one of " + ", ".join(TARGETS[kind])
    return f"{expected}, got {format_value(target)}{did_you_mean(target, TARGETS[kind])}"
