"""The datasets that run.yaml names, as TRL takes them: rows with a column `prompt`.

Files, folders and hub names are read as `datasets` reads them. What every row is, and in which order they stand,
is a function of run.yaml and of the data alone, so that a restart sees the same prompts.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy
from datasets.exceptions import DatasetNotFoundError

from policies.model.datasets import FILE_KINDS, bad_line, counts_of, file_kind
from policies.model.spec import Dataset, datasets_of
from tasks.trainer.user_objects import BadSpec, passes
from tasks.trainer.user_prompts import in_one_line, is_chat, prompt_maker


@dataclass(frozen=True, slots=True)
class Data:
    """Rows, and by its key in run.yaml the first of each dataset among them, with the columns of all."""

    rows: datasets.Dataset
    firsts: Mapping[str, Mapping[str, Any]]


def load_data(key: str, wanted: Dataset | tuple[Dataset, ...], workdir: Path, rows_used: int) -> Data:
    """Load one dataset, or several as one. Raises BadSpec naming `key`.

    Args:
        workdir: the folder of run.yaml.
        rows_used: as many the run can use; no more are read of a stream.
    """
    parts: dict[str, datasets.Dataset] = {}
    several = datasets_of(wanted)
    for index, one in enumerate(several):
        here = key if one is wanted else f"{key}[{index}]"
        parts[here] = _with_prompts(here, _load(here, one, workdir, rows_used), one, workdir)
    rows = _together(key, parts)
    starts = itertools.accumulate(map(len, parts.values()), initial=0)
    firsts = {here: rows[start] for here, start in zip(parts, starts, strict=False)}
    if several[0].weight is not None:
        rows = _shared(rows, [len(part) for part in parts.values()], [one.weight or 0.0 for one in several])
    return Data(rows, firsts)


def prompts_used(config: Any) -> int:
    """How many prompts a training of this GRPOConfig takes: those of its generations in `max_steps` steps."""
    batches = config.max_steps * config.gradient_accumulation_steps
    generations = -(-batches // (config.steps_per_generation * config.num_iterations))
    return int(generations * (config.generation_batch_size // config.num_generations))


def _load(key: str, wanted: Dataset, workdir: Path, rows_used: int) -> datasets.Dataset:
    _check_cache()
    path = workdir / wanted.path
    kind = file_kind(path.name)
    asked = {"split": wanted.split, "streaming": wanted.streaming}
    try:
        if path.is_file():
            if kind is None:
                raise BadSpec(f"{key}: {path} is not read; expected a file in {', '.join(FILE_KINDS)}")
            loaded = datasets.load_dataset(kind, wanted.name, data_files=str(path), **asked)
            if kind == "json" and not wanted.streaming:  # its reader alone does not look whether texts are UTF-8
                loaded.data.table.validate(full=True)
        elif path.is_dir():
            loaded = datasets.load_dataset(str(path), wanted.name, **asked)
        elif kind is not None or wanted.path.startswith((".", "/", "~")):
            raise BadSpec(f"{key}: there is no file or folder {path}; name one, or a dataset on the hub")
        else:
            loaded = datasets.load_dataset(wanted.path, wanted.name, revision=wanted.revision, **asked)
        if wanted.streaming:
            first = list(loaded.take(rows_used))
            loaded = datasets.Dataset.from_list(first, features=loaded.features if first else None)
    except StopIteration:  # which `datasets` lets out of files that are empty
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
    """Return what a DatasetGenerationError hides: its own text is the same for every fault."""
    hidden = isinstance(error, datasets.exceptions.DatasetGenerationError)
    return error.__cause__ if hidden and error.__cause__ is not None else error


def _check_cache() -> None:
    """Raise BadSpec where the folder cannot be written that `datasets` prepares every dataset in.

    In a container it lies below a home that is missing or read-only.
    """
    folder = Path(datasets.config.HF_DATASETS_CACHE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if passes(error):
            raise
        cannot = f"{folder} cannot be written ({error.strerror}), and datasets are prepared there"
        hint = "set HOME or HF_HOME there to a folder that can be, as `HF_HOME: /tmp/huggingface`"
        raise BadSpec(f"trainer.env: {cannot}; {hint}") from error


def _with_prompts(key: str, rows: datasets.Dataset, wanted: Dataset, workdir: Path) -> datasets.Dataset:
    if wanted.prompt is None:
        if "prompt" not in rows.column_names:
            only = ", ".join(rows.column_names)
            message = f"{wanted.path} has no column `prompt`, only {only}"
            raise BadSpec(f"{key}: {message}; {_how_to_make_prompts(rows)}")
        _check_column(key, rows)
        return rows
    make = prompt_maker(f"{key}.prompt", wanted.prompt, rows, workdir)
    # Not from the cache: what a function's module has become since then is not seen by its key there.
    try:
        return rows.map(make, with_indices=True, load_from_cache_file=False)
    except (ValueError, TypeError, OverflowError) as error:  # pyarrow's
        if passes(error):
            raise
        raise BadSpec(f"{key}.prompt: what it returns is no column: {in_one_line(error)}") from error


def _how_to_make_prompts(rows: datasets.Dataset) -> str:
    """A hint for data without prompts, by what its first row holds."""
    chats = [name for name, value in rows[0].items() if is_chat(value)]
    if chats:
        function = "name a function that returns those to answer, as `prompt: prompts.of_row`"
        return f"`{chats[0]}` holds chats: {function}, or rename it if its chats end before the answer"
    return f'say how one is made, as in `prompt: "{{{rows.column_names[0]}}}"`'


def _check_column(key: str, rows: datasets.Dataset) -> None:
    """TRL takes the first prompt of a step for what all are, and fails at one that is nothing once it is drawn."""
    may_be_mixed = isinstance(rows.features["prompt"], datasets.Json)
    if may_be_mixed and len({is_chat(one) for one in rows["prompt"]}) > 1:
        raise BadSpec(f"{key}: its prompts are of several types; expected texts alone, or chats alone")
    column = rows.data.column("prompt")
    if column.null_count:
        number = column.is_null().index(True).as_py()
        raise BadSpec(f"{key}: the prompt of row {number} is nothing; expected a text or a chat in every row")


def _together(key: str, parts: Mapping[str, datasets.Dataset]) -> datasets.Dataset:
    """One after the other. A column that one lacks is None in its rows."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    forms = {here: "chats" if is_chat(part[0]["prompt"]) else "texts" for here, part in parts.items()}
    if len(set(forms.values())) > 1:
        said = ", ".join(f"those of {here} are {form}" for here, form in forms.items())
        raise BadSpec(f"{key}: expected prompts of one form; {said}")
    known = {name: one for part in parts.values() for name, one in part.features.items() if not _is_null(one)}
    try:
        return datasets.concatenate_datasets([_typed(part, known) for part in parts.values()])
    except (ValueError, TypeError) as error:  # pyarrow's
        name, found = _unlike(parts)
        said = ", ".join(f"{kind} in {here}" for here, kind in found.items())
        hint = "make it so by a `prompt` function that returns the column, too"
        raise BadSpec(f"{key}: the column {name} is {said}; expected one type; {hint}") from error


def _typed(part: datasets.Dataset, known: Mapping[str, Any]) -> datasets.Dataset:
    """With others' types where it has nothing, which as it is goes with structures only behind them."""
    for name in [name for name, feature in part.features.items() if _is_null(feature) and name in known]:
        part = part.cast_column(name, known[name])
    return part


def _is_null(feature: Any) -> bool:
    return isinstance(feature, datasets.Value) and feature.dtype == "null"


def _unlike(parts: Mapping[str, datasets.Dataset]) -> tuple[str, dict[str, str]]:
    """The first column that is of several types, and which it is in each dataset; null goes with any."""
    types: dict[str, dict[str, str]] = {}
    for here, part in parts.items():
        for name, feature in part.features.items():
            kind = feature.dtype if isinstance(feature, datasets.Value) else str(feature)
            if not _is_null(feature):
                types.setdefault(name, {})[here] = kind
    return next(one for one in types.items() if len(set(one[1].values())) > 1)


def _shared(rows: datasets.Dataset, sizes: list[int], weights: list[float]) -> datasets.Dataset:
    """Rows in the shares of `weights`, each at least once, evenly mixed: what is too few for its share repeats."""
    counts = counts_of(sizes, weights)
    starts = itertools.accumulate(sizes, initial=0)
    taken = [start + numpy.arange(count) % size for start, count, size in zip(starts, counts, sizes, strict=False)]
    places = [(numpy.arange(count) + 0.5) / count for count in counts]
    order = numpy.argsort(numpy.concatenate(places), kind="stable")
    return rows.select(numpy.concatenate(taken)[order])
