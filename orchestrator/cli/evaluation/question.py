"""What an evaluation is of: policies, problems, and the name and store that follow from them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from blake3 import blake3
from msgspec import to_builtins

from checkpoint.records import documents
from checkpoint.records.documents import RunRecord
from checkpoint.records.forks import read_forks
from checkpoint.store import layout
from checkpoint.store.codec import to_json
from checkpoint.store.run_store import Store
from checkpoint.stream.catalog import Catalog
from checkpoint.stream.manifest import files_below
from orchestrator.cli.checkpoints import NEWEST, find_checkpoint
from orchestrator.cli.console import Stop
from orchestrator.config.reading.modules import modules_below
from orchestrator.home.folder import run_id_of
from policies.evaluation.as_run import as_run
from policies.model import exit_codes
from policies.model.datasets import FILE_KINDS, file_kind, is_import_path
from policies.model.evaluation import BASE, Evaluation, Subject
from policies.model.spec import Dataset, RunSpec, datasets_of
from policies.model.timelines import lineage, on_lineage

# An evaluation's name is a digest of its run.yaml without the keys that change no answer.
IDLE_KEYS = ("notify", "metrics_port")
IDLE_POLICIES = ("fleet", "kl")
IDLE_ROLLOUT_KEYS = ("own_generation_after_s",)
NAMED_MAX = 8  # policies in an evaluation's name: a folder's has an end


def find_subjects(parent: Store, wanted: Sequence[str], *, base: bool) -> tuple[Subject, ...]:
    """The base first: its weights are what the others are loaded over. The newest checkpoint is one that the run
    has not gone back from. Raises Stop."""
    listed, forks = Catalog(parent, "eval").newest().checkpoints, read_forks(parent)
    line = lineage(forks, max((fork.timeline for fork in forks), default=0))
    present = [one for one in listed if on_lineage(one.at, line)]
    found = [find_checkpoint(present if text == NEWEST else listed, text) for text in wanted]
    named = {one.version: Subject(one.version, one.manifest, one.digest) for one in found}
    return (*([Subject(BASE)] if base else []), *(named[key] for key in sorted(named, key=_order)))


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split("-")))


def find_problems(spec: RunSpec, named: str | None) -> Dataset | tuple[Dataset, ...]:
    """What is evaluated on. A dataset that is named has its prompts made as the run's are. Raises Stop."""
    trainer = spec.trainer
    if named is None:
        if trainer.eval_dataset is None:
            message = "run.yaml names no trainer.eval_dataset; name held-out problems with --dataset"
            raise Stop(message, exit_codes.USAGE)
        return trainer.eval_dataset
    like = datasets_of(trainer.eval_dataset or trainer.dataset)[0]
    path = Path(named).resolve()
    if not os.path.exists(path):  # which a name of any length may be asked of
        if named.startswith((".", "/", "~")) or file_kind(named) is not None:
            raise Stop(f"--dataset {named}: there is no such file or folder", exit_codes.USAGE)
        known = next((one for one in datasets_of(trainer.dataset) if one.path == named), Dataset(path=named))
        # The other splits are for training; that of the same dataset, perhaps.
        return replace(known, split="test", prompt=like.prompt, weight=None)
    if path.is_file() and file_kind(path.name) is None:
        raise Stop(f"--dataset {named}: is not read; expected a file in {', '.join(FILE_KINDS)}", exit_codes.USAGE)
    workdir = Path(spec.workdir).resolve()
    if spec.cloud != "local" and not path.is_relative_to(workdir):
        message = f"--dataset {named}: machines get a copy of {spec.workdir} and of nothing else; put it there"
        raise Stop(message, exit_codes.USAGE)
    told = str(path) if spec.cloud == "local" else str(path.relative_to(workdir))
    return Dataset(path=told, prompt=like.prompt)


def run_of(
    parent: Store,
    record: RunRecord,
    subjects: tuple[Subject, ...],
    problems: Dataset | tuple[Dataset, ...],
    rows: int | None,
) -> tuple[Store, RunRecord]:
    """The evaluation's store and its run, named by what is evaluated and how."""
    evaluation = Evaluation(parent.url, subjects, rows)
    asked = _without_idle_keys(to_builtins(as_run(record.spec, "", problems)))
    told = to_json([evaluation, asked, _contents(record.spec, problems)])
    named = [one.name for one in subjects[:NAMED_MAX]]
    more = [f"{len(subjects) - NAMED_MAX}-more"] if len(subjects) > NAMED_MAX else []
    name = f"{'_'.join(named + more)}-{blake3(told).hexdigest(4)}"
    store = Store(f"{parent.url}/{layout.evaluation(name)}", retry_s=parent.retry_s)
    spec = as_run(record.spec, store.url, problems)
    run_id = run_id_of(spec.name, store.url)
    return store, RunRecord(documents.SCHEMA, run_id, time.time(), spec, evaluation)


def _without_idle_keys(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec without the keys that change no answer, so that they cause no second evaluation."""
    rollout = {key: value for key, value in spec["rollout"].items() if key not in IDLE_ROLLOUT_KEYS}
    policies = {key: value for key, value in spec["policies"].items() if key not in IDLE_POLICIES}
    answering = {key: value for key, value in spec.items() if key not in IDLE_KEYS}
    return answering | {"policies": policies, "rollout": rollout}


def _contents(spec: RunSpec, problems: Dataset | tuple[Dataset, ...]) -> dict[str, str]:
    """Digests of what is read from the run's folder, or beside it: files with problems, and the modules that make
    prompts of them, score, and are tools or environments, with those that these import. With others it is another
    evaluation."""
    workdir, several, trainer = Path(spec.workdir), datasets_of(problems), spec.trainer
    prompts = (one.prompt for one in several if isinstance(one.prompt, str))
    said = (*trainer.reward_funcs, *trainer.tools, trainer.environment_factory or "", *prompts)
    named = [one.rpartition(".")[0] for one in said if is_import_path(one)]
    found: dict[str, str] = {}
    for path in [*(workdir / one.path for one in several), *modules_below(workdir, named)]:
        below = files_below(path) if path.is_dir() else [(path.name, path)] if path.is_file() else []
        for name, file in below:
            found[f"{path}/{name}"] = blake3().update_mmap(file).hexdigest()
    return found
