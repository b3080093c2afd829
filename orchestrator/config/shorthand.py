"""Shorthands of run.yaml, written out to the shape of RunSpec: datasets, replicas, paths, storage, rehearsal,
deadline.

What is relative in the file is relative to the folder of the file, from wherever it is read.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestrator.config.document import OPTIONS, Document
from orchestrator.config.problems import Findings, KeyPath, did_you_mean, unknown_key
from orchestrator.config.structure import Kind, mismatch, shown
from policies.model.datasets import FILE_KINDS


def absolute(text: str, workdir: Path) -> Path:
    """Raises nothing: `~` alone is expanded, not the home of another user."""
    path = Path(text)
    if path.parts[:1] == ("~",):
        path = Path.home().joinpath(*path.parts[1:])
    # Not `resolve`: where a link leads may change, and the user knows the path by this name.
    return Path(os.path.normpath(workdir / path))


WORDS = re.compile(r"[^\s\"'`=;:|&()<>]+")  # of a shell script


@dataclass(frozen=True, slots=True)
class _Here:
    """What is known of the file while its paths are read."""

    workdir: Path
    findings: Findings
    is_sky: bool
    setup: str  # the trainer's script


def write_out(document: Document, workdir: Path, findings: Findings) -> None:
    """Bring the document's data to the shape of `policies.model.spec.RunSpec`, in place."""
    data = document.data
    is_sky = data.get("cloud") == "sky"
    if isinstance(data.get("secrets"), str):
        data["secrets"] = [data["secrets"]]
    notify = data.get("notify")
    for key in ("url_env", "command"):
        if isinstance(notify, dict) and isinstance(notify.get(key), str):
            notify[key] = [notify[key]]
    trainer = data.get("trainer")
    if isinstance(trainer, dict):
        setup = trainer.get("setup")
        _trainer(trainer, _Here(workdir, findings, is_sky, setup if isinstance(setup, str) else ""))
    rollout = data.get("rollout")
    if isinstance(rollout, dict):
        _rollout(rollout)
    for name, section in (("trainer", trainer), ("rollout", rollout)):
        if isinstance(section, dict) and isinstance(section.get("env"), dict):
            _env(section["env"], name, document.texts)


def _trainer(trainer: dict[str, Any], here: _Here) -> None:
    for key in ("reward_funcs", "tools"):
        if isinstance(trainer.get(key), str):
            trainer[key] = [trainer[key]]
    if isinstance(trainer.get("agent"), str):
        trainer["agent"] = {"run": trainer["agent"]}
    if isinstance(rewards := trainer.get("reward_funcs"), list):
        for index, reward in enumerate(rewards):
            if isinstance(reward, str) and "/" in reward:  # a model
                where: KeyPath = ("trainer", "reward_funcs", index)
                rewards[index] = _local(reward, where, (), here)
    if isinstance(trainer.get("model"), str):
        trainer["model"] = _local(trainer["model"], ("trainer", "model"), (), here)
    for key in ("dataset", "eval_dataset"):
        if isinstance(named := trainer.get(key), list):
            for index, one in enumerate(named):
                named[index] = _dataset(one, ("trainer", key, index), here)
        elif named is not None:
            trainer[key] = _dataset(named, ("trainer", key), here)


def _dataset(named: Any, path: KeyPath, here: _Here) -> Any:
    dataset = {"path": named} if isinstance(named, str) else named
    if isinstance(dataset, dict) and isinstance(dataset.get("path"), str):
        dataset["path"] = _local(dataset["path"], (*path, "path"), tuple(FILE_KINDS), here)
    return dataset


def _rollout(rollout: dict[str, Any]) -> None:
    replicas = rollout.get("replicas")
    if isinstance(replicas, int) and not isinstance(replicas, bool):
        rollout["replicas"] = {"min": replicas, "max": replicas}
    elif isinstance(replicas, dict) and "min" in replicas and "max" not in replicas:
        replicas["max"] = replicas["min"]


def _env(env: dict[str, Any], section: str, texts: dict[KeyPath, str]) -> None:
    """An environment holds texts: `OMP_NUM_THREADS: 1` means the text as it stands in the file."""
    for name, value in env.items():
        if isinstance(value, bool | int | float):
            env[name] = texts[(section, "env", name)]


def _local(text: str, path: KeyPath, files: tuple[str, ...], here: _Here) -> str:
    """A hub name stays; a folder, or a file of one of the kinds `files`, becomes absolute. On other machines paths
    are theirs, and stay."""
    found, findings = absolute(text, here.workdir), here.findings
    if not text:
        findings.add(path, "is empty; expected a name on the hub, or a path")
        return text
    if here.is_sky and text.startswith(("/", "~")):
        if text.startswith("~"):
            findings.add(path, "~ is not known on other machines; expected the whole path, or a relative one")
        return text
    if os.path.isdir(found) or (os.path.isfile(found) and found.name.endswith(files)):
        return text if here.is_sky else str(found)
    if os.path.isfile(found):
        expected = f"a folder or a file that ends in {', '.join(files)}" if files else "a folder"
        findings.add(path, f"{found} is a file; expected {expected}")
    elif text.startswith(("/", "./", "../", "~")) or (files and text.endswith(files)):
        if _is_made(found, here):
            return str(found)
        findings.add(path, f"no such file or folder: {found}; relative paths start at the folder of this file")
    return text


def _is_made(found: Path, here: _Here) -> bool:
    """Whether the trainer's `setup` may make it, on this machine: it names the path or a folder above it."""
    words = {os.path.normpath(here.workdir / word) for word in WORDS.findall(here.setup)}
    above = [one for one in (found, *found.parents) if here.workdir in one.parents]
    return not here.is_sky and any(str(one) in words for one in above)


# `storage`: where the run is kept, and what the client of that store needs to reach it. The options may hold
# secrets. They are handed to the processes that work on the store and go nowhere else: RunSpec has the URL alone,
# and no message quotes an option.

STORAGE_KEYS = ("url", "options")
EXPECTED_STORE = "expected a folder or a URL, as in s3://bucket/my-run"
PASSWORD = "a password in the URL would be stored with the run; expected it among storage.options"
_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*$")
_SLASH_LOST = re.compile(r"^(file|s3|gs|az):")


@dataclass(frozen=True, slots=True)
class Storage:
    """A store as a user names it; `options` in the words of its client, None where the user names a URL alone."""

    url: str
    options: dict[str, str] | None = field(default=None, repr=False)  # may hold secrets


def write_out_storage(document: Document, workdir: Path, findings: Findings) -> dict[str, str]:
    """Bring `storage` to the URL that RunSpec takes, in place, and return the options."""
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
        data["storage"] = ""  # stands in for the one that was reported
    return _options(storage.get("options"), document.texts, findings)


def _options(options: Any, texts: dict[KeyPath, str], findings: Findings) -> dict[str, str]:
    """Each option as a text. Numbers keep their spelling: an account may be called 0123."""
    if options is None:
        return {}
    if not isinstance(options, dict):
        findings.add(OPTIONS, "expected a mapping of the store client's options, as in {region: eu-west-1}")
        return {}
    found = {}
    for name, value in options.items():
        match value:
            case bool():
                found[name] = "true" if value else "false"
            case str() | int() | float():
                found[name] = texts[(*OPTIONS, name)]
            case _:
                findings.add((*OPTIONS, name), "expected text, a number, true or false")
    return found


def _url(url: str, here: KeyPath, workdir: Path, findings: Findings, *, is_sky: bool) -> str:
    """`./run`, `/data/run` and `file://./run` become `file:///...`; other URLs stay as they are."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "file", url
    if problem := _url_problem(url, scheme, rest):
        findings.add(here, problem)
    elif scheme != "file":
        return url.rstrip("/")
    elif is_sky:
        findings.add(here, "a folder is on this machine only; with cloud: sky, expected s3://, gs:// or az://")
    elif not is_text(found := f"file://{absolute(rest, workdir)}"):
        findings.add(here, f"{found!a} is no text in UTF-8; expected a folder whose name is")
    else:
        return found
    return url


def _url_problem(url: str, scheme: str, rest: str) -> str:
    """What is wrong with a store's URL by its look; whether its scheme can be opened, the store says."""
    if "://" not in url and (found := _SLASH_LOST.match(url)):
        return f"neither a folder nor a URL; expected {found[1]}:// and what follows"
    if url.startswith("//"):
        return f"nothing stands before //; {EXPECTED_STORE}"
    if scheme == "memory":
        return f"memory:// ends with its process; {EXPECTED_STORE}"
    if not _SCHEME.match(scheme):
        return f"what stands before :// is no URL scheme; {EXPECTED_STORE}"
    if not rest.strip("/ "):
        return f"names no folder or bucket; {EXPECTED_STORE}"
    if unusual := [char for char in "?#%\\" if char in rest]:
        return f"{unusual[0]!r} means something else in a URL; expected a path without it"
    if scheme != "file" and has_password(url):
        return PASSWORD
    return ""


def is_text(url: str) -> bool:
    """Whether a store's URL can be written down: a path has stand-ins of Python's for bytes that are no text."""
    return not any("\ud800" <= char <= "\udfff" for char in url)


def has_password(url: str) -> bool:
    """Whether a store's URL has one."""
    try:
        return urlsplit(url).password is not None
    except ValueError:  # brackets that hold no address: no password either
        return False


# `rehearse`: faults as a user writes them, `{at_step: 9, preempt: rollouts, notice_s: 5}`, and prices by role.

REHEARSAL_KEYS = ("faults", "prices")
TARGETS = {
    "kill": ("rollout-N", "rollouts", "trainer", "trainer-0", "gateway", "daemon"),
    "preempt": ("rollout-N", "rollouts", "trainer-0"),
    "no_capacity": ("rollout-N", "rollouts", "trainer-0"),
}
# Stands in for a fault that was reported, so that the others keep their places.
_REPORTED = {"fault": "kill", "at_step": 0}
_NODE = re.compile(r"^rollout-(0|[1-9][0-9]{0,5})$")


def write_out_rehearsal(data: dict[str, Any], replicas_max: int | None, findings: Findings) -> None:
    """Replace `data["rehearse"]` by its long form. `replicas_max` bounds the rollout nodes that can be named."""
    section = data.get("rehearse")
    if section is None:
        return
    here: KeyPath = ("rehearse",)
    if message := mismatch(section, Kind("dict")):
        findings.add(here, message + "; its keys are " + ", ".join(REHEARSAL_KEYS))
        del data["rehearse"]
        return
    if data.get("cloud", "local") != "local":
        findings.add(
            here, "faults are rehearsed on the local cloud alone; set cloud: local or remove this section"
        )
    for key in section.keys() - set(REHEARSAL_KEYS):
        findings.add((*here, key), unknown_key(key, REHEARSAL_KEYS))
    data["rehearse"] = _prices(section.get("prices"), findings)
    data["rehearse"]["faults"] = _faults(section.get("faults"), replicas_max, findings)


def _faults(faults: Any, replicas_max: int | None, findings: Findings) -> list[dict[str, Any]]:
    here: KeyPath = ("rehearse", "faults")
    if message := mismatch(faults, Kind("list | None")):
        findings.add(here, message)
        return []
    found = []
    for index, fault in enumerate(faults or ()):
        plain = None
        if message := mismatch(fault, Kind("dict")):
            findings.add((*here, index), f"{message}, as in {{at_step: 5, kill: rollout-0}}")
        else:
            plain = _fault(fault, (*here, index), replicas_max, findings)
        found.append(plain or _REPORTED)
    return found


def _fault(
    fault: dict[str, Any], path: KeyPath, replicas_max: int | None, findings: Findings
) -> dict[str, Any] | None:
    kinds = [key for key in fault if key in TARGETS]
    if len(kinds) != 1:
        unknown = [key for key in fault if key not in ("at_step", "for_s", "notice_s", *TARGETS)]
        near = did_you_mean(unknown[0], TARGETS) if unknown else ""
        findings.add(path, f"expected exactly one of {', '.join(TARGETS)} in a fault{near}")
        return None
    kind = kinds[0]
    takes = ["at_step", kind]
    if kind == "preempt":
        takes.append("notice_s")
    if kind == "no_capacity" or fault[kind] == "daemon":
        takes.append("for_s")
    for key in fault.keys() - set(takes):
        findings.add((*path, key), unknown_key(key, takes))
    if "at_step" not in fault:
        findings.missing((*path, "at_step"), "missing; expected the step after which the fault is done")
        return None
    if message := _target_problem(kind, fault[kind], replicas_max):
        findings.add((*path, kind), message)
        return None
    findings.rename((*path, kind), (*path, "target"))
    times = {key: value for key, value in fault.items() if key in takes and key != kind}
    return {"fault": kind, "target": fault[kind], **times}


def _target_problem(kind: str, target: Any, replicas_max: int | None) -> str:
    expected = "expected one of " + ", ".join(TARGETS[kind])
    if not isinstance(target, str):
        return f"{expected}, got {shown(target)}"
    node = _NODE.match(target)
    if replicas_max == 0 and (node or target == "rollouts"):
        return "there are no rollout nodes: rollout.replicas is 0"
    if node:
        if replicas_max is not None and int(node[1]) >= replicas_max:
            return f"there is no {target}; the last is rollout-{replicas_max - 1}, by rollout.replicas.max"
        return ""
    if target in TARGETS[kind] and target != "rollout-N":
        return ""
    return f"{expected}, got {shown(target)}{did_you_mean(target, TARGETS[kind])}"


def _prices(prices: Any, findings: Findings) -> dict[str, Any]:
    """`prices.trainer` becomes `trainer_prices`; what is in it is checked with the rest of the structure."""
    here: KeyPath = ("rehearse", "prices")
    if message := mismatch(prices, Kind("dict | None")):
        findings.add(here, message)
        return {}
    found = {}
    for role, value in (prices or {}).items():
        if role not in ("trainer", "rollout"):
            findings.add((*here, role), unknown_key(role, ("trainer", "rollout")))
            continue
        better = ("rehearse", f"{role}_prices")
        findings.rename((*here, role), better)
        for key in value if isinstance(value, dict) else ():
            findings.rename((*here, role, key), (*better, key))
        found[f"{role}_prices"] = value
    return found


# `policies.fleet.deadline`, in the one form that is stored, `2026-11-30T18:00:00Z`.

DEADLINE: KeyPath = ("policies", "fleet", "deadline")
EXPECTED_TIME = "expected a date and a time with its zone, as in 2026-11-30T18:00+01:00"
STORED = "%Y-%m-%dT%H:%M:%SZ"


def write_out_deadline(data: dict[str, Any], now_s: float, findings: Findings) -> None:
    """Replace the deadline by its stored form. Without a zone it is in UTC, as YAML has it."""
    policies = data.get("policies")
    fleet = policies.get("fleet") if isinstance(policies, dict) else None
    if not isinstance(fleet, dict) or (named := fleet.get("deadline")) is None:
        return
    time = _time_of(named)
    if time is None:
        findings.add(DEADLINE, f"{EXPECTED_TIME}, got {shown(named)}")
        del fleet["deadline"]
        return
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
        findings.notice(DEADLINE, "names no zone, and is read as UTC; write it as in 2026-11-30T18:00+01:00")
    if time.timestamp() <= now_s:
        now = datetime.fromtimestamp(now_s, UTC).strftime(STORED)
        findings.add(DEADLINE, f"has passed: {named} is before now, {now}; expected a time to come")
    fleet["deadline"] = time.astimezone(UTC).strftime(STORED)


def _time_of(named: Any) -> datetime | None:
    """The time; None where it is none, or a day alone, of which nobody knows which hour is meant."""
    text = named.strip() if isinstance(named, str) else ""
    try:
        time = datetime.fromisoformat(text)
        time.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return time if ":" in text and time.year >= 1970 else None
