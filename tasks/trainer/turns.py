"""Loads the tools, environments and rollout function that run.yaml names, and tries them at the first start.

TRL runs the turns themselves (`tasks.trl.parts.tool_turns`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from grpo_orch.policies.model.spec import RunSpec, TrainerSpec
from grpo_orch.tasks.rewards.user_calls import FAULTS, Rule, guarded_factory, guarded_tool
from grpo_orch.tasks.trainer.user_data import shown
from grpo_orch.tasks.trainer.user_objects import (
    BadSpec,
    first_line,
    is_cut_off,
    is_out_of_memory,
    load_environments,
    load_function,
    passes,
)

ENVIRONMENTS = "trainer.environment_factory"
OF_EVERY_ENVIRONMENT = ("reset", "get_reward")  # TRL calls these; the model may call the other public methods


def load_turns(wanted: TrainerSpec, workdir: Path) -> dict[str, Any]:
    """Import tools, environments and rollout function, as arguments of TRL's trainer. Raises BadSpec."""
    found: dict[str, Any] = {}
    if wanted.tools:
        found["tools"] = [load_function("trainer.tools", path, workdir) for path in wanted.tools]
    if wanted.environment_factory is not None:
        found["environment_factory"] = load_environments(wanted.environment_factory, workdir)
    if wanted.rollout_func is not None:
        found["rollout_func"] = load_function("trainer.rollout_func", wanted.rollout_func, workdir)
    return found


def guarded_turns(turns: Mapping[str, Any], spec: RunSpec) -> dict[str, Any]:
    """Return tools and environments with their hangs and errors under the rules for rewards."""
    policies, found = spec.policies, dict(turns)
    rule = Rule(
        policies.on_bad_reward,
        policies.reward_timeout_s,
        lambda error: is_cut_off(error) or is_out_of_memory(error),
    )
    if "tools" in found:
        named = zip(found["tools"], spec.trainer.tools, strict=True)
        found["tools"] = [guarded_tool(tool, name, rule) for tool, name in named]
    if (factory := found.get("environment_factory")) is not None:
        name = spec.trainer.environment_factory or ""
        several = factory if isinstance(factory, dict) else {"": factory}
        made = {key: guarded_factory(factory, name, rule) for key, factory in several.items()}
        found["environment_factory"] = made if isinstance(factory, dict) else made[""]
    return found


def check_turns(
    turns: dict[str, Any],
    firsts: Mapping[str, Mapping[str, Any]],
    count: int,
    limited: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
) -> dict[str, list[Any]] | None:
    """Try tools and environments on the first row of each dataset. Raises BadSpec naming what TRL could not use.

    Returns, by the dataset's key, `count` environments that were begun with its row, for the reward functions;
    None without environments.
    """
    begun = {key: _check_turns(turns, key, dict(row), count, limited) for key, row in firsts.items()}
    return begun if "environment_factory" in turns else None


def _check_turns(
    turns: dict[str, Any],
    key: str,
    row: dict[str, Any],
    count: int,
    limited: Callable[[str], AbstractContextManager[object]],
) -> list[Any]:
    tools, factory = turns.get("tools", []), turns.get("environment_factory")
    if (tools or factory is not None) and isinstance(row["prompt"], str):
        raise BadSpec(f"{key}: its first prompt is a text, and tools are called in chats; expected messages")
    _check_described("trainer.tools", tools)
    if factory is None:
        return []
    if isinstance(factory, dict):
        name = row.pop("environment", None)
        if name not in factory:
            expected = f"expected a column `environment` with one of {', '.join(map(repr, factory))}"
            raise BadSpec(f"{ENVIRONMENTS}: the environment of the first row of {key} is {name!r}; {expected}")
        factory = factory[name]
    with limited(ENVIRONMENTS):
        return [_begun(factory, key, row) for _ in range(count)]


def _begun(factory: Callable[[], Any], key: str, row: dict[str, Any]) -> Any:
    """Return a new environment, begun as TRL begins one."""
    try:
        made = factory()
        made.reset(**row)
    except FAULTS as error:  # the user's code may raise anything
        if passes(error):
            raise
        raised = f"{type(error).__name__}: {first_line(error)}"
        raise BadSpec(f"{ENVIRONMENTS}: beginning one with the first row of {key} raised {raised}") from error
    names = [name for name, _ in inspect.getmembers(type(made), inspect.isfunction) if not name.startswith("_")]
    _check_described(ENVIRONMENTS, [getattr(made, name) for name in names if name not in OF_EVERY_ENVIRONMENT])
    return made


def _check_described(key: str, tools: Iterable[Callable[..., Any]]) -> None:
    """Check that type hints and docstring describe each tool to the model. Raises BadSpec."""
    for tool in tools:
        try:
            get_json_schema(tool)
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise BadSpec(f"{key}: {first_line(error)}") from error
        except Exception as error:  # not a function, or bad type hints, which may raise anything
            raised = f"{type(error).__name__}: {first_line(error)}"
            raise BadSpec(f"{key}: {shown(tool)} cannot be described to a model: {raised}") from error
