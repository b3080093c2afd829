"""Load the datasets that run.yaml names in TRL's form: rows with a column `prompt`.

`datasets` reads the files, folders and hub names. Rows and their order depend on run.yaml and the data alone, so a
restart sees the same prompts.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy
from datasets.exceptions import DatasetNotFoundError
from datasets.fingerprint import Hasher

from grpo_orch.policies.model.datasets import (
    FILE_KINDS,
    Template,
    bad_line,
    counts_of,
    file_kind,
    is_import_path,
    read_template,
)
from grpo_orch.policies.model.spec import Dataset, datasets_of
from grpo_orch.tasks.rewards.user_calls import FAULTS
from grpo_orch.tasks.trainer.user_objects import BadSpec, load_function, passes

Row = dict[str, Any]
EXPECTED = "expected a text, or a list of messages, each with `role` and `content`"
LINE_MAX = 300


@dataclass(frozen=True, slots=True)
class Data:
    """All rows, and the first row of each dataset by its key in run.yaml, with the columns of all datasets."""

    rows: datasets.Dataset
    firsts: Mapping[str, Mapping[str, Any]]


def load_data(key: str, wanted: Dataset | tuple[Dataset, ...], workdir: Path, rows_used: int) -> Data:
    """Load one dataset, or several combined. Raises BadSpec naming `key`.

    Args:
        workdir: the folder of run.yaml.
        rows_used: how many rows the run can use; limits what is read of a stream.
    """
    parts: dict[str, datasets.Dataset] = {}
    configured = datasets_of(wanted)
    for index, dataset in enumerate(configured):
        part_key = key if dataset is wanted else f"{key}[{index}]"
        parts[part_key] = _with_prompts(part_key, _load(part_key, dataset, workdir, rows_used), dataset, workdir)
    rows = _concatenate(key, parts)
    starts = itertools.accumulate(map(len, parts.values()), initial=0)
    firsts = {part_key: rows[start] for part_key, start in zip(parts, starts, strict=False)}
    if configured[0].weight is not None:
        weights = [dataset.weight or 0.0 for dataset in configured]
        rows = _mix_by_weight(rows, [len(part) for part in parts.values()], weights)
    return Data(rows, firsts)


def prompts_used(config: Any) -> int:
    """Return the number of prompts that training by this GRPOConfig takes in `max_steps` steps."""
    batches = config.max_steps * config.gradient_accumulation_steps
    generations = -(-batches // (config.steps_per_generation * config.num_iterations))
    return int(generations * (config.generation_batch_size // config.num_generations))


def _load(key: str, wanted: Dataset, workdir: Path, rows_used: int) -> datasets.Dataset:
    _check_cache()
    path = workdir / wanted.path
    kind = file_kind(path.name)
    options = {"split": wanted.split, "streaming": wanted.streaming}
    try:
        if path.is_file():
            if kind is None:
                raise BadSpec(f"{key}: {path} is not read; expected a file in {', '.join(FILE_KINDS)}")
            loaded = datasets.load_dataset(kind, wanted.name, data_files=str(path), **options)
            if kind == "json" and not wanted.streaming:  # only the JSON reader does not check for valid UTF-8
                loaded.data.table.validate(full=True)
        elif path.is_dir():
            loaded = datasets.load_dataset(str(path), wanted.name, **options)
        elif kind is not None or wanted.path.startswith((".", "/", "~")):
            raise BadSpec(f"{key}: there is no file or folder {path}; name one, or a dataset on the hub")
        else:
            loaded = datasets.load_dataset(wanted.path, wanted.name, revision=wanted.revision, **options)
        if wanted.streaming:
            taken = list(loaded.take(rows_used))
            loaded = datasets.Dataset.from_list(taken, features=loaded.features if taken else None)
    except StopIteration:  # `datasets` raises it for empty files
        loaded = datasets.Dataset.from_dict({})
    except (DatasetNotFoundError, ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        if passes(error):
            raise
        reason = _bad_line(path) or in_one_line(_first_cause(error))
        raise BadSpec(f"{key}: {wanted.path}: {reason}") from error
    if len(loaded) == 0:
        raise BadSpec(f"{key}: {wanted.path} has no rows")
    return loaded


def _bad_line(path: Path) -> str:
    if path.suffix != ".jsonl" or not path.is_file():
        return ""
    with path.open("rb") as lines:
        return bad_line(lines)


def _first_cause(error: BaseException) -> BaseException:
    """Return the cause of a DatasetGenerationError, whose own text is the same for every fault."""
    is_wrapper = isinstance(error, datasets.exceptions.DatasetGenerationError)
    return error.__cause__ if is_wrapper and error.__cause__ is not None else error


def _check_cache() -> None:
    """Raise BadSpec if the folder in which `datasets` prepares every dataset is not writable.

    In a container it may be below a home folder that is missing or read-only.
    """
    folder = Path(datasets.config.HF_DATASETS_CACHE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if passes(error):
            raise
        problem = f"{folder} cannot be written ({error.strerror}), and datasets are prepared there"
        hint = "set HOME or HF_HOME there to a folder that can be, as `HF_HOME: /tmp/huggingface`"
        raise BadSpec(f"trainer.env: {problem}; {hint}") from error


def _with_prompts(key: str, rows: datasets.Dataset, wanted: Dataset, workdir: Path) -> datasets.Dataset:
    if wanted.prompt is None:
        if "prompt" not in rows.column_names:
            columns = ", ".join(rows.column_names)
            message = f"{wanted.path} has no column `prompt`, only {columns}"
            raise BadSpec(f"{key}: {message}; {_how_to_make_prompts(rows)}")
        _check_column(key, rows)
        return rows
    make = prompt_maker(f"{key}.prompt", wanted.prompt, rows, workdir)
    # Not from the cache: its key does not change when the function's module changes.
    try:
        return rows.map(make, with_indices=True, load_from_cache_file=False)
    except (ValueError, TypeError, OverflowError) as error:  # pyarrow's
        if passes(error):
            raise
        raise BadSpec(f"{key}.prompt: what it returns is no column: {in_one_line(error)}") from error


def _how_to_make_prompts(rows: datasets.Dataset) -> str:
    """Return a hint for data without prompts, based on its first row."""
    chats = [name for name, value in rows[0].items() if is_chat(value)]
    if chats:
        function = "name a function that returns those to answer, as `prompt: prompts.of_row`"
        return f"`{chats[0]}` holds chats: {function}, or rename it if its chats end before the answer"
    return f'say how one is made, as in `prompt: "{{{rows.column_names[0]}}}"`'


def _check_column(key: str, rows: datasets.Dataset) -> None:
    """Raise BadSpec for prompts of mixed types or missing prompts.

    TRL takes the first prompt's type for a whole step, and fails at a missing prompt only when it draws that row.
    """
    may_be_mixed = isinstance(rows.features["prompt"], datasets.Json)
    if may_be_mixed and len({is_chat(prompt) for prompt in rows["prompt"]}) > 1:
        raise BadSpec(f"{key}: its prompts are of several types; expected texts alone, or chats alone")
    column = rows.data.column("prompt")
    if column.null_count:
        number = column.is_null().index(True).as_py()
        raise BadSpec(f"{key}: the prompt of row {number} is nothing; expected a text or a chat in every row")


def _concatenate(key: str, parts: Mapping[str, datasets.Dataset]) -> datasets.Dataset:
    """Concatenate the datasets. A column that a dataset lacks is None in its rows."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    forms = {part_key: "chats" if is_chat(part[0]["prompt"]) else "texts" for part_key, part in parts.items()}
    if len(set(forms.values())) > 1:
        found = ", ".join(f"those of {part_key} are {form}" for part_key, form in forms.items())
        raise BadSpec(f"{key}: expected prompts of one form; {found}")
    features = [item for part in parts.values() for item in part.features.items()]
    known = {name: feature for name, feature in features if not _is_null(feature)}
    try:
        return datasets.concatenate_datasets([_cast_null_columns(part, known) for part in parts.values()])
    except (ValueError, TypeError) as error:  # pyarrow's
        hint = "a `prompt` function may return the column, too"
        raise BadSpec(f"{key}: expected one type of each column; {hint}: {in_one_line(error)}") from error


def _cast_null_columns(part: datasets.Dataset, known: Mapping[str, Any]) -> datasets.Dataset:
    """Cast columns without values to the types of the other datasets.

    Without the cast, a null column concatenates with structures only after them.
    """
    for name in [name for name, feature in part.features.items() if _is_null(feature) and name in known]:
        part = part.cast_column(name, known[name])
    return part


def _is_null(feature: Any) -> bool:
    return isinstance(feature, datasets.Value) and feature.dtype == "null"


def _mix_by_weight(rows: datasets.Dataset, sizes: list[int], weights: list[float]) -> datasets.Dataset:
    """Mix the datasets evenly by `weights`. Each row is used at least once; small datasets repeat rows."""
    counts = counts_of(sizes, weights)
    starts = itertools.accumulate(sizes, initial=0)
    indices = [
        start + numpy.arange(count) % size for start, count, size in zip(starts, counts, sizes, strict=False)
    ]
    positions = [(numpy.arange(count) + 0.5) / count for count in counts]
    order = numpy.argsort(numpy.concatenate(positions), kind="stable")
    return rows.select(numpy.concatenate(indices)[order])


# Prompts of rows: by a template, a template in each message of a chat, or the user's function.


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
