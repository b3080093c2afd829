"""What run.yaml names and only the trainer's machine can load: models, functions, environments.

A name that leads nowhere is told in one line, for the user to repair.
"""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoConfig

from policies.model.spec import TrainerSpec
from tasks.machine.base_model import model_folder

# Of the machine or the network, not of run.yaml: another try may find them gone.
PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class BadSpec(Exception):
    """The run's specification cannot be carried out; running it again will not help."""


def model_path(spec: TrainerSpec, workdir: Path) -> str:
    """A folder below the run's, as an absolute path; anything else is a hub name. Raises BadSpec."""
    folder = workdir / spec.model
    if folder.is_dir():
        return str(folder)
    if spec.model.startswith((".", "/", "~")):
        raise BadSpec(f"trainer.model: there is no folder {folder}; name one, or a model on the hub")
    return spec.model


def load_function(key: str, import_path: str, workdir: Path) -> Callable[..., Any]:
    """Import a function; modules beside run.yaml come first. Raises BadSpec naming `key`."""
    return _function(key, import_path, _load(key, import_path, workdir))


def load_environments(import_path: str, workdir: Path) -> Any:
    """Import what makes environments: one callable, or a mapping of them by name. Raises BadSpec."""
    key = "trainer.environment_factory"
    found = _load(key, import_path, workdir)
    for made in found.values() if isinstance(found, dict) else (found,):
        _function(key, import_path, made)
    return found


def load_rewards(named: Iterable[str], workdir: Path) -> list[Callable[..., Any] | str]:
    """Import reward functions; a reward model stays a name, which TRL loads. Raises BadSpec."""
    key = "trainer.reward_funcs"
    return [_reward_model(one, workdir) if "/" in one else load_function(key, one, workdir) for one in named]


def _load(key: str, import_path: str, workdir: Path) -> Any:
    if str(workdir) not in sys.path:
        sys.path.insert(0, str(workdir))
    module_name, _, name = import_path.rpartition(".")
    if not module_name:
        raise BadSpec(f"{key}: {import_path!r} is no import path, expected module.function")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise BadSpec(f"{key}: {import_path}: {first_line(error)}") from error


def _function(key: str, import_path: str, found: Any) -> Callable[..., Any]:
    if not callable(found):
        raise BadSpec(f"{key}: {import_path} is not a function; expected module.function")
    function: Callable[..., Any] = found
    return function


def _reward_model(name: str, workdir: Path) -> str:
    """A folder below the run's, as an absolute path, or a hub name; one whose head is trained. Raises BadSpec."""
    key, folder = f"trainer.reward_funcs: {name}", workdir / name
    path = str(folder) if folder.is_dir() else name
    try:
        made_as = AutoConfig.from_pretrained(path).architectures or ["nothing that its config.json names"]
    except (OSError, ValueError) as error:
        if passes(error):
            raise
        raise BadSpec(f"{key}: {first_line(error)}") from error
    if not made_as[0].endswith("ForSequenceClassification"):
        random_head = f"is a {made_as[0]}, whose scores would come from a head drawn at random"
        raise BadSpec(f"{key} {random_head}; expected a model for sequence classification")
    return path


def local_folder(spec: TrainerSpec, workdir: Path) -> Path | None:
    """The folder on this machine that the model's files are in: its own, or that of the hub's cache."""
    folder = workdir / spec.model
    return model_folder(str(folder) if folder.is_dir() else spec.model)


def passes(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, is worth another try: a hub out of reach, a full disk."""
    while error is not None:
        if isinstance(error, LocalEntryNotFoundError | ConnectionError) and not constants.is_offline_mode():
            return True
        if isinstance(error, OSError) and error.errno in PASSING:
            return True
        error = error.__cause__ or error.__context__
    return False


def first_line(error: BaseException) -> str:
    """An error in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
