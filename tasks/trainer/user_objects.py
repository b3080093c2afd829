"""Loads what run.yaml names and only the trainer's machine has: models, functions, environments.

An import path that leads nowhere is reported in one line, for the user to repair.
"""

from __future__ import annotations

import errno
import importlib
import inspect
import json
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from jinja2 import TemplateError
from transformers import AutoConfig

from grpo_orch.policies.model.spec import RunSpec, TrainerSpec
from grpo_orch.tasks.machine.base_model import model_folder
from grpo_orch.tasks.rewards.in_workers import with_arguments
from grpo_orch.tasks.rewards.user_calls import FAULTS, guarded

# Errors of the machine or the network, not of run.yaml: they may pass.
PASSING = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE}
)
# Messages of `datasets`, pyarrow and safetensors, whose errors have no number.
FULL_DISK_TEXTS = ("Not enough disk space", "No space left on device", "Disk quota exceeded")
UNREACHABLE = frozenset({errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH})
# Errors of HTTP clients, by name: not all of them are installed.
NETWORK_ERRORS = frozenset(
    {
        *("aiohttp.ClientConnectionError", "aiohttp.ClientPayloadError"),
        *("httpx.TransportError", "httpx2.TransportError"),
        *("requests.ChunkedEncodingError", "requests.ConnectionError", "requests.Timeout"),
    }
)
BUSY = frozenset({408, 425, 429})  # statuses of a server that may answer later, as those from 500
# CUDA's and ROCm's allocators, cuBLAS for its workspace, and torch's allocator of the machine's own memory.
OUT_OF_MEMORY_TEXTS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")

# Errors that TRL, transformers, datasets and templates raise for an unusable configuration or data. OSError is not
# among them: it may pass.
MISTAKES = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    NameError,
    ImportError,
    SyntaxError,
    AssertionError,
    NotImplementedError,
    TemplateError,
)

Reward = Callable[..., Any] | str  # a function, or the name of a model


class BadSpec(Exception):
    """The run's specification cannot be carried out; running it again will not help."""


def model_path(spec: TrainerSpec, workdir: Path) -> str:
    """Return a folder below the run's as an absolute path; anything else is a hub name. Raises BadSpec."""
    folder = workdir / spec.model
    if folder.is_dir():
        return str(folder)
    if spec.model.startswith((".", "/", "~")):
        raise BadSpec(f"trainer.model: there is no folder {folder}; name one, or a model on the hub")
    return spec.model


def load_function(key: str, import_path: str, workdir: Path) -> Callable[..., Any]:
    """Import a function; modules next to run.yaml come first. Raises BadSpec naming `key`."""
    return _function(key, import_path, _load(key, import_path, workdir))


def load_environments(import_path: str, workdir: Path) -> Any:
    """Import environment factories: one callable, or a mapping of callables by name. Raises BadSpec."""
    key = "trainer.environment_factory"
    loaded = _load(key, import_path, workdir)
    for factory in loaded.values() if isinstance(loaded, dict) else (loaded,):
        _function(key, import_path, factory)
    return loaded


def load_rewards(spec: TrainerSpec, workdir: Path) -> list[Reward]:
    """Import reward functions, with their arguments; a model stays a name, which TRL loads. Raises BadSpec."""
    names = spec.reward_funcs
    return [_reward_model(name, workdir) if "/" in name else _reward(name, spec, workdir) for name in names]


def guarded_rewards(rewards: Sequence[Reward], spec: RunSpec) -> list[Reward]:
    """Return rewards with each function under the run's rule for bad rewards. TRL calls models itself.

    TRL logs a function's scores by its name, which is its last name in run.yaml, or all of it where two end alike.
    """
    policies, paths = spec.policies, spec.trainer.reward_funcs
    names = [path.rpartition(".")[2] for path in paths]
    made: list[Reward] = []
    for reward, path, name in zip(rewards, paths, names, strict=True):
        if isinstance(reward, torch.nn.Module | str):
            made.append(reward)
            continue
        function = guarded(
            reward,
            path,
            policies.on_bad_reward,
            policies.reward_timeout_s,
            lambda error: is_cut_off(error) or is_out_of_memory(error),
        )
        function.__name__ = path if names.count(name) > 1 else name
        made.append(function)
    return made


def _reward(import_path: str, spec: TrainerSpec, workdir: Path) -> Callable[..., Any]:
    name = import_path.rpartition(".")[2]
    function = _named(load_function("trainer.reward_funcs", import_path, workdir), name)
    arguments = spec.reward_args.get(name)
    try:
        return function if arguments is None else with_arguments(function, arguments)
    except TypeError as error:
        raise BadSpec(f"trainer.reward_args: {import_path}: {first_line(error)}") from error


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a callable object, a partial or a lambda in a function with its name in the module: TRL logs it by that
    name, and awaits functions only."""
    if isinstance(function, torch.nn.Module) or getattr(function, "__name__", "").isidentifier():
        return function

    def named(**arguments: Any) -> Any:
        return function(**arguments)

    async def awaited(**arguments: Any) -> Any:
        return await function(**arguments)

    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    made: Any = awaited if is_async else named
    made.__name__, made.__wrapped__ = name, function  # whose signature it has
    return made  # type: ignore[no-any-return]


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
    except FAULTS as error:  # the user's code may raise anything
        if passes(error) or is_out_of_memory(error):
            raise
        raised = f"{type(error).__name__} was raised as it was imported: {first_line(error)}"
        raise BadSpec(f"{key}: {import_path}: {raised}") from error


def _function(key: str, import_path: str, found: Any) -> Callable[..., Any]:
    if not callable(found):
        raise BadSpec(f"{key}: {import_path} is not a function; expected module.function")
    function: Callable[..., Any] = found
    return function


def _reward_model(name: str, workdir: Path) -> str:
    """Return the folder or hub name of a reward model with a trained head. Raises BadSpec."""
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
    """Return the folder of the model's files on this machine: its own, or the hub's cache."""
    folder = workdir / spec.model
    return model_folder(str(folder) if folder.is_dir() else spec.model)


def passes(error: BaseException) -> bool:
    """Whether an error, or its cause, may pass: an unreachable hub, a full disk."""
    return is_cut_off(error) or any(map(_is_of_network, _chain(error)))


def is_cut_off(error: BaseException) -> bool:
    """Whether the machine or its network is at fault, so that no rule for bad rewards applies."""
    return any(map(_is_cut_off, _chain(error)))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, each once: `raise error from error` makes a ring."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_cut_off(error: BaseException) -> bool:
    if isinstance(error, LocalEntryNotFoundError | ConnectionError):
        return not constants.is_offline_mode()
    return isinstance(error, OSError) and error.errno in PASSING


def _is_of_network(error: BaseException) -> bool:
    """Whether a server did not answer or is busy, or a disk is full without an error number."""
    if isinstance(error, TimeoutError | socket.gaierror | ssl.SSLError):
        return not isinstance(error, ssl.SSLCertVerificationError)
    if isinstance(error, HfHubHTTPError):
        response = getattr(error, "response", None)  # None for a missing local file
        status = getattr(response, "status_code", 0)
        return status in BUSY or status >= 500
    if isinstance(error, OSError) and error.errno in UNREACHABLE:
        return True
    bases = (f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(error).__mro__)
    return not NETWORK_ERRORS.isdisjoint(bases) or any(text in str(error) for text in FULL_DISK_TEXTS)


def is_mistake(error: BaseException) -> bool:
    """Whether the user must repair an error before the first step: it would be raised again each time."""
    return isinstance(error, MISTAKES) and not isinstance(error, json.JSONDecodeError) and not passes(error)


def is_of_machine(error: BaseException) -> bool:
    """Whether a GPU or the connection between processes has failed."""
    kinds = torch.AcceleratorError | torch.distributed.DistError
    return any(isinstance(cause, kinds) for cause in _chain(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the accelerator or the machine has no memory left; torch has several types and texts for it."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)


def first_line(error: BaseException) -> str:
    """Return an error's first line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
