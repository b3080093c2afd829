"""Check data and rewards on a first start, before any rollout machine is requested.

Without these checks a mistake would fail only at the first completions, on a paid fleet. Each reward function is
called once, as TRL calls it: on a real row, with completions in the form (text or chat) of the prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
from transformers import TrainerState
from transformers.utils import is_liger_kernel_available

from grpo_orch.policies.model.spec import RunSpec, generates_itself
from grpo_orch.policies.sizing.engine import context_problem
from grpo_orch.tasks.rewards.user_calls import FAULTS, NOT_SCORES, call_alone
from grpo_orch.tasks.trainer.user_data import EXPECTED, in_one_line, is_chat, shown
from grpo_orch.tasks.trainer.user_objects import BadSpec, first_line, is_mistake, passes

# Two, to detect a function that returns one number for all. A model may generate anything.
ANSWERS = ("42", "The answer is 42.")
IMAGES = frozenset({"image", "images"})  # columns that TRL reads
OWN_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})  # TRL passes these under other names
# TRL passes these along with the columns: a column with such a name would be passed twice, or lost.
PASSED = ("prompts", "completions", "trainer_state", "log_extra", "log_metric", "environments")


def check_prompts(firsts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise BadSpec unless the first prompt of each dataset is a text or a chat, which TRL accepts."""
    for key, row in firsts.items():
        if not (isinstance(row["prompt"], str) or is_chat(row["prompt"])):
            raise BadSpec(f"{key}: its first prompt is {shown(row['prompt'])}; {EXPECTED}")
        if IMAGES & row.keys() or _shows_image(row["prompt"]):
            raise BadSpec(f"{key}: its prompts have images, and completions are made of text alone; drop them")


def _try_prompt(trainer: Any, prompt: Any) -> None:
    """Tokenize a prompt as a step does.

    Raises ValueError for a token without an embedding, as one that was added to the tokenizer alone, and what TRL,
    transformers and the chat template raise.
    """
    if trainer.environment_factories is not None:
        return
    largest = max(trainer.tokenized([prompt])[0], default=0)
    known = trainer.model.config.get_text_config().vocab_size
    if largest >= known:
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ValueError(
            f"{token} is token {largest}, and the model has only {known} embeddings; call "
            "`resize_token_embeddings` on the model, or remove the token from the tokenizer"
        )


def check_row_count(rows: int, config: Any) -> None:
    """Raise BadSpec if the dataset has fewer rows than a batch of completions has prompts.

    TRL drops the incomplete last batch, so nothing would be trained.
    """
    needed = config.generation_batch_size // config.num_generations
    if rows < needed:
        counts = f"has {rows} {'row' if rows == 1 else 'rows'}, and a batch takes {needed} prompts"
        sizes = f"{config.generation_batch_size} completions, {config.num_generations} of each prompt"
        lower = "grpo.per_device_train_batch_size or gradient_accumulation_steps"
        raise BadSpec(f"trainer.dataset: it {counts} ({sizes}); add rows, or lower {lower}")


def check_tokens(trainer: Any, firsts: Mapping[str, Mapping[str, Any]], model: str) -> None:
    """Tokenize the first prompt of each dataset as a step does. Raises BadSpec naming the dataset."""
    for key, row in firsts.items():
        try:
            _try_prompt(trainer, row["prompt"])
        except Exception as error:
            if not is_mistake(error):
                raise
            if is_chat(row["prompt"]) and not getattr(trainer.processing_class, "chat_template", None):
                hint = "put a chat_template.jinja into the model's folder, name a model that has one, or "
                texts = 'make the prompts texts, as `prompt: "{column}"` does'
                raise BadSpec(
                    f"{key}: its prompts are chats, and trainer.model {model} has no chat template; {hint}{texts}"
                ) from error
            raised = f"{type(error).__name__}: {in_one_line(error)}"
            raise BadSpec(f"{key}: its first prompt cannot be made into tokens: {raised}") from error


def check_lengths(spec: RunSpec, completion: int, config: Mapping[str, Any]) -> None:
    """Raise BadSpec if every prompt would be refused, whatever its length. `config`: the model's config.json.

    `validate` can check this only for a model in a folder next to run.yaml.
    """
    flags = {} if generates_itself(spec) else spec.rollout.vllm
    if problem := context_problem(flags, spec.rollout.env, completion, config):
        raise BadSpec(f"{'.'.join(problem[0])}: {problem[1]}")


def check_packages(config: Any) -> None:
    """Raise BadSpec for a missing package that transformers would import only in the first step."""
    if config.use_liger_kernel and not is_liger_kernel_available():
        raise BadSpec(
            "grpo.use_liger_kernel: it is not installed; add `pip install liger-kernel` to trainer.setup"
        )


def check_rewards(
    functions: Sequence[Callable[..., Any] | str],
    names: Sequence[str],
    firsts: Mapping[str, Mapping[str, Any]],
    config: Any,
    limited: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
    environments: Mapping[str, Sequence[Any]] | None = None,
    more_columns: Mapping[str, Sequence[Any]] = MappingProxyType({}),
) -> None:
    """Call each reward function once per dataset. Raises BadSpec naming the first that TRL could not use.

    Skips reward models, which TRL loads.

    Args:
        names: the functions' import paths.
        firsts: the first row of each dataset, by its key.
        config: TRL's. Each function gets a whole group, because it may compare the group's completions.
        limited: limits the time of a call, given its key in run.yaml.
        environments: by dataset key, one environment for each completion, if the run has any.
        more_columns: override the dataset's columns of the same names.
    """
    for key, row in firsts.items():
        taken = [] if config.remove_unused_columns else [name for name in PASSED if name in row]
        if taken:
            message = f"its column `{taken[0]}` has the name of what TRL passes to reward functions"
            raise BadSpec(
                f"{key}: {message}; rename it, or drop all columns with grpo.remove_unused_columns: true"
            )
        arguments = _reward_arguments(row, config)
        if environments is not None:
            arguments["environments"] = environments[key]
        arguments |= {name: list(values) for name, values in more_columns.items()}
        columns = sorted(arguments.keys() & row.keys() - OWN_COLUMNS)
        called = f"it was called on the first row of {key}, with {', '.join(columns) or 'no other columns'}"
        for function, name in zip(functions, names, strict=True):
            if not isinstance(function, torch.nn.Module | str):
                with limited(function_key := f"trainer.reward_funcs: {name}"):
                    _check_reward(function, function_key, arguments, called)


def _reward_arguments(row: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the arguments that TRL passes to a reward function for a group of completions."""
    count, chat = config.num_generations, is_chat(row["prompt"])
    answers = [ANSWERS[i % len(ANSWERS)] for i in range(count)]
    columns = [] if config.remove_unused_columns else row.keys() - OWN_COLUMNS
    return {
        "prompts": [row["prompt"]] * count,
        "completions": [[{"role": "assistant", "content": text}] if chat else text for text in answers],
        "completion_ids": [[0] for _ in answers],
        "trainer_state": TrainerState(max_steps=max(1, config.max_steps)),  # -1: by epochs
        "log_extra": lambda *_, **__: None,
        "log_metric": lambda *_, **__: None,
        **{name: [row[name]] * count for name in columns},
    }


def _check_reward(function: Callable[..., Any], key: str, arguments: dict[str, Any], called: str) -> None:
    if not hasattr(function, "__name__"):
        raise BadSpec(f"{key} has no name, by which TRL logs it; expected a function")
    count = len(arguments["completions"])
    expected = f"expected {count} numbers or None, one for each completion"
    try:
        returned = call_alone(function, arguments)
        if inspect.iscoroutinefunction(function):
            returned = asyncio.run(_awaited(returned))
    except FAULTS as error:  # the user's code may raise anything
        if passes(error):
            raise
        raise BadSpec(f"{key} raised {type(error).__name__}: {first_line(error)}; {called}") from error
    if inspect.iscoroutine(returned):
        returned.close()
        raise BadSpec(f"{key} returned a coroutine, which TRL awaits of an `async def` alone; make it one")
    try:
        values = None if isinstance(returned, NOT_SCORES) else list(returned)
    except TypeError as error:
        raise BadSpec(f"{key} returned {shown(returned)}; {expected}") from error
    if values is None:
        raise BadSpec(f"{key} returned a {type(returned).__name__}; {expected}, in a list")
    if len(values) != count:
        raise BadSpec(f"{key} returned {len(values)} values; {expected}")
    for value in values:
        if not _is_reward(value):
            raise BadSpec(f"{key} returned {shown(value)} among its values; {expected}")


def _shows_image(prompt: Any) -> bool:
    contents = [message["content"] for message in prompt] if is_chat(prompt) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") == "image" for part in parts)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _is_reward(value: Any) -> bool:
    """Return True if TRL can use it as a reward. NaN means None; infinity would spoil the whole step."""
    if value is None:
        return True
    try:
        tensor = torch.tensor([value], dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    return tensor.shape == (1,) and not math.isinf(tensor.item())
