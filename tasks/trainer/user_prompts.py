"""Makes prompts of rows: by a template, a template in each message of a chat, or the user's function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
from datasets.fingerprint import Hasher

from grpo_orch.policies.model.datasets import Template, is_import_path, read_template
from grpo_orch.tasks.rewards.user_calls import FAULTS
from grpo_orch.tasks.trainer.user_objects import BadSpec, load_function, passes

Row = dict[str, Any]
EXPECTED = "expected a text, or a list of messages, each with `role` and `content`"
LINE_MAX = 300


def prompt_maker(
    key: str, prompt: str | Sequence[dict[str, str]], rows: datasets.Dataset, workdir: Path
) -> Callable[[Row, int], Row]:
    """Return a function of a row and its number that returns the columns to set: `prompt`, and others of the
    user's function.

    Raises BadSpec naming `key`, as the returned function does.
    """
    if isinstance(prompt, str) and is_import_path(prompt):
        return _by_function(key, prompt, load_function(key, prompt, workdir), rows)
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    try:
        templates = [read_template(text) for text in texts]
    except ValueError as error:
        raise BadSpec(f"{key}: {error}") from error
    for name in (name for template in templates for name in template.columns):
        if name not in rows.column_names:
            raise BadSpec(f"{key}: there is no column {name}; expected one of {', '.join(rows.column_names)}")
    roles = None if isinstance(prompt, str) else [message["role"] for message in prompt]
    return _by_templates(key, templates, roles)


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of chat messages."""
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt)


def in_one_line(error: BaseException) -> str:
    """Return an error in one line. Later lines may have the remedy, as those of `datasets` do."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LINE_MAX else f"{text[:LINE_MAX]}..."


def shown(value: Any) -> str:
    """Return a value in one short line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _by_templates(key: str, templates: list[Template], roles: list[str] | None) -> Callable[[Row, int], Row]:
    def make(row: Row, number: int) -> Row:
        try:
            texts = [template.fill(row) for template in templates]
        except ValueError as error:
            raise BadSpec(f"{key}: row {number}: {error}") from error
        if roles is None:
            return {"prompt": texts[0]}
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        return {"prompt": messages}

    return make


def _by_function(
    key: str, name: str, function: Callable[..., Any], rows: datasets.Dataset
) -> Callable[[Row, int], Row]:
    def make(row: Row, number: int) -> Row:
        argument = dict(row)
        try:
            made = function(argument)
        except FAULTS as error:  # the user's code may raise anything
            if passes(error):
                raise
            raised = f"{name} raised {type(error).__name__}: {in_one_line(error)}"
            raise BadSpec(f"{key}: {raised}; it was called on row {number}, with {', '.join(argument)}") from error
        columns = made if isinstance(made, dict) else {"prompt": made}
        if not (isinstance(prompt := columns.get("prompt"), str) or is_chat(prompt)):
            wrong = f"{name} returned {shown(made)} for row {number}"
            raise BadSpec(f"{key}: {wrong}; {EXPECTED}, or a mapping with such a `prompt`")
        return columns

    first = make(rows[0], 0)
    # Compared by content: == fails for arrays and NaN.
    if Hasher.hash(first) != Hasher.hash(make(rows[0], 0)):
        raise BadSpec(f"{key}: {name} returned two prompts for one row; expected the same, for a restart needs it")
    expected = _form(first, rows.column_names)

    def make_alike(row: Row, number: int) -> Row:
        columns = make(row, number)
        if (found := _form(columns, rows.column_names)) != expected:
            raise BadSpec(
                f"{key}: {name} returned {found} for row {number}; expected {expected}, as for the first"
            )
        return columns

    return make_alike


def _form(columns: Row, known: Sequence[str]) -> str:
    """Describe what must be the same for all rows: `datasets` takes new columns from the first row."""
    new = ", ".join(sorted(str(name) for name in columns.keys() - {"prompt", *known}))
    return f"a {'text' if isinstance(columns['prompt'], str) else 'chat'}{new and f' with {new}'}"
