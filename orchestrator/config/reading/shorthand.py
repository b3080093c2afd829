"""Shorthands of run.yaml, written out: `replicas: 2`, a dataset's bare name.

Also paths: what is relative in the file is relative to the folder of the file, whoever reads it and from where.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.document import Document
from orchestrator.config.problems import Findings, KeyPath
from orchestrator.config.reading.paths import absolute
from policies.model.datasets import FILE_KINDS

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
