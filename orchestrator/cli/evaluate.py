"""`grpo-orch eval`: compare policies of a run on held-out problems, with greedy decoding.

An evaluation is a separate run, in its own store prefix below the evaluated run's: with the same fleet, and an
evaluator instead of the trainer. Its name is derived from what it evaluates, so the same command continues it or
shows its results.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from blake3 import blake3
from msgspec import to_builtins
from rich.table import Table

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.records import documents, evaluations
from grpo_orch.checkpoint.records.documents import RunRecord, read_forks
from grpo_orch.checkpoint.records.evaluations import EvaluationResult
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.checkpoint.store.errors import AlreadyExists
from grpo_orch.checkpoint.store.probe import probe
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.checkpoint.stream.manifest import files_below
from grpo_orch.orchestrator.cli.checkpoints import NEWEST, find_checkpoint
from grpo_orch.orchestrator.cli.options import (
    AsJson,
    Output,
    Stop,
    Target,
    Yes,
    confirm,
    errors,
    print_line,
    print_result,
    require_terminal,
)
from grpo_orch.orchestrator.cli.remote import has_daemon
from grpo_orch.orchestrator.cli.start import refuse_missing_secrets, show_plan
from grpo_orch.orchestrator.cli.target import open_run
from grpo_orch.orchestrator.config.model_size import find_size
from grpo_orch.orchestrator.control.launcher import AlreadyControlled, start_daemon
from grpo_orch.orchestrator.home import run_digest, run_id_of, run_token, save_run_digest, save_store_options
from grpo_orch.orchestrator.plan.machines import cached_lookup
from grpo_orch.orchestrator.views.formatting import UNKNOWN_TEXT
from grpo_orch.policies.evaluation import intervals
from grpo_orch.policies.evaluation.evaluation_spec import as_run
from grpo_orch.policies.evaluation.intervals import Estimate
from grpo_orch.policies.evaluation.judging import Verdict
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.datasets import FILE_KINDS, file_kind
from grpo_orch.policies.model.phases import TERMINAL_RUN
from grpo_orch.policies.model.spec import Dataset, RunSpec, datasets_of
from grpo_orch.policies.model.timelines import lineage, on_lineage
from grpo_orch.policies.model.vocabulary import BASE, Evaluation, RunPhase, Subject

VERDICT_LABELS = {
    Verdict.CORRECT: "correct",
    Verdict.WRONG: "right form, wrong",
    Verdict.UNREADABLE: "unreadable",
    Verdict.UNSCORED: "not scored",
}


@dataclass(frozen=True, slots=True)
class Estimates:
    """What is shown of a policy, or of the difference between two; None for a reward without any score."""

    shares: dict[Verdict, Estimate]
    rewards: dict[str, Estimate | None]
    tokens: Estimate | None


def results_table(results: Sequence[EvaluationResult]) -> Table:
    """Return a table of shares and mean rewards; the last column is the last policy minus the first."""
    headers, columns = [result.subject for result in results], [(_of_policy(result), "") for result in results]
    if len(results) > 1:
        headers.append("difference")
        columns.append((_difference(results[0], results[-1]), "+"))
    table = Table("", *headers, title=f"greedy, {len(results[0].verdicts)} problems, 95 % intervals")
    for verdict in _verdicts(results):
        label = VERDICT_LABELS[verdict] if verdict is not Verdict.WRONG or results[0].readable_by else "wrong"
        table.add_row(label, *(_percent(found.shares[verdict], sign) for found, sign in columns))
    table.add_section()
    for name in results[0].scores:
        table.add_row(name, *(_number(found.rewards[name], sign) for found, sign in columns))
    table.add_section()
    table.add_row("tokens", *(_number(found.tokens, sign) for found, sign in columns))
    table.add_row("cut off", *(f"{result.cut}" for result in results))
    return table


def results_json(results: Sequence[EvaluationResult], store: str) -> dict[str, Any]:
    """Return the results as JSON data; shares are from 0 to 1."""
    first, last = results[0], results[-1]
    document: dict[str, Any] = {
        "store": store,
        "problems": len(first.verdicts),
        "judged_by": first.judged_by,
        "readable_by": first.readable_by,
        "policies": {result.subject: {**asdict(_of_policy(result)), "cut": result.cut} for result in results},
    }
    if len(results) > 1:
        document["difference"] = {"of": [first.subject, last.subject], **asdict(_difference(first, last))}
    return document


def _of_policy(result: EvaluationResult) -> Estimates:
    count = len(result.verdicts)
    return Estimates(
        shares={verdict: intervals.share(result.verdicts.count(verdict), count) for verdict in Verdict},
        rewards={name: intervals.mean(scores) for name, scores in result.scores.items()},
        tokens=intervals.mean(result.tokens),
    )


def _difference(first: EvaluationResult, last: EvaluationResult) -> Estimates:
    def share_difference(verdict: Verdict) -> Estimate:
        before, after = ([found == verdict for found in result.verdicts] for result in (first, last))
        return intervals.shares_apart(before, after)

    return Estimates(
        shares={verdict: share_difference(verdict) for verdict in Verdict},
        rewards={name: intervals.means_apart(first.scores[name], last.scores[name]) for name in first.scores},
        tokens=intervals.means_apart(first.tokens, last.tokens),
    )


def _verdicts(results: Sequence[EvaluationResult]) -> list[Verdict]:
    """Return the table's verdicts: unreadable only if a function decides that, unscored only if any is."""
    found = {verdict for result in results for verdict in result.verdicts}
    verdicts = [Verdict.CORRECT, Verdict.WRONG]
    if results[0].readable_by:
        verdicts.append(Verdict.UNREADABLE)
    return [*verdicts, *([Verdict.UNSCORED] if Verdict.UNSCORED in found else [])]


def _percent(estimate: Estimate, sign: str) -> str:
    low, high = 100 * estimate.low, 100 * estimate.high
    return f"{100 * estimate.value:{sign}.1f} % ({low:{sign}.1f} to {high:{sign}.1f})"


def _number(estimate: Estimate | None, sign: str) -> str:
    if estimate is None:
        return UNKNOWN_TEXT
    return f"{estimate.value:{sign}.3f} ({estimate.low:{sign}.3f} to {estimate.high:{sign}.3f})"


# The command.

POLL_S = 2.0  # a poll is about eight requests, and an evaluation takes minutes

Steps = Annotated[
    list[str] | None, typer.Option("--step", help="A checkpoint, as `200` or `1-200`. May be repeated.")
]
Rows = Annotated[int | None, typer.Option("--rows", min=1, help="Evaluate only the first N problems.")]
Detach = Annotated[
    bool, typer.Option("-d", "--detach", help="Return immediately and print how to see the results.")
]


def evaluate(
    target: Target = None,
    step: Steps = None,
    base: Annotated[bool, typer.Option("--base", help="Evaluate the model that training began from.")] = False,
    final: Annotated[bool, typer.Option("--final", help="Evaluate the newest checkpoint.")] = False,
    dataset: Annotated[
        str | None, typer.Option(help="A file or a dataset's name. Default: trainer.eval_dataset.")
    ] = None,
    rows: Rows = None,
    yes: Yes = False,
    detach: Detach = False,
    output: AsJson = Output.TEXT,
) -> None:
    """Compare policies of a run on held-out problems; by default the base model and the newest checkpoint.

    Each problem is completed once, with greedy decoding.
    """
    parent, record = open_run(target)
    if record.evaluation is not None:
        _show(_read_results(parent, record.evaluation.subjects), parent, output)
        return
    if record.spec.trainer.agent is not None:
        why = "eval scores single answers; this run trains an agent (trainer.agent)"
        raise Stop(why)
    wanted = [*(step or []), *([NEWEST] if final else [])]
    if not wanted and not base:
        wanted, base = [NEWEST], True
    subjects = find_subjects(parent, wanted, base=base)
    problems = find_problems(record.spec, dataset)
    store, evaluation_run = run_of(parent, record, subjects, problems, rows)
    if store.get_or_none(layout.RUN) is None:
        _create(parent, store, evaluation_run, yes=yes)
    evaluation_run = documents.read_run(store)
    if len(_read_results(store, subjects)) < len(subjects):
        _start(store, evaluation_run)
        if detach:
            _print_detached(store, output)
            return
        try:
            _wait(store, subjects)
        except KeyboardInterrupt:
            _print_detached(store, output)
            return
    _show(_read_results(store, subjects), store, output)


def _create(parent: Store, store: Store, record: RunRecord, *, yes: bool) -> None:
    """Write the evaluation's run.json. Raises Stop if the user declines."""
    require_terminal(yes)
    refuse_missing_secrets(record.spec)
    probe(store)
    show_plan(record, store, None, cached_lookup(find_size), errors)
    confirm("Evaluate?", yes=yes)
    if store.options:
        save_store_options(store.url, {key: str(value) for key, value in store.options.items()})
    assert record.evaluation is not None
    pinned = replace(record.evaluation, subjects=pin(parent, record.evaluation.subjects))
    try:
        data = documents.create_run(store, replace(record, evaluation=pinned))
        save_run_digest(store.url, run_digest(data))
        pin(parent, pinned.subjects)  # an evaluation that finished in between may have unpinned them
    except AlreadyExists:  # the same command runs elsewhere
        print_line(f"{store.url} was started by another process.")


def _start(store: Store, record: RunRecord) -> None:
    """Start a daemon for the evaluation unless it has one."""
    if has_daemon(store):
        return
    refuse_missing_secrets(record.spec)
    run_token(record.run_id)
    is_known = journal.recover(store).state.name
    with contextlib.suppress(AlreadyControlled):  # the same command runs elsewhere
        start_daemon(store, record, "resume" if is_known else "up")


def _wait(store: Store, subjects: Sequence[Subject]) -> None:
    """Wait until all results are in the store. Raises Stop if the evaluation ended without them."""
    with errors.status("waiting for machines") as status:
        while True:
            done = len(_read_results(store, subjects))
            state = journal.recover(store).state
            has_ended = state.phase in TERMINAL_RUN and not state.nodes
            if has_ended and state.phase is RunPhase.FINISHED and done == len(subjects):
                return
            if has_ended or not has_daemon(store):
                break
            beat = documents.TRAINER.read(store)
            activity = "waiting for machines" if beat is None else beat.activity
            status.update(f"{done} of {len(subjects)} policies; {activity}")
            time.sleep(POLL_S)
    if len(_read_results(store, subjects)) == len(subjects):
        return
    why = state.reason if has_ended else "its daemon is gone"
    hint = f"see `grpo-orch logs trainer-0 {store.quoted}`; repeat the command to continue"
    raise Stop(f"the evaluation in {store.url} is not complete: {why}; {hint}", exit_codes.FAILED)


def _print_detached(store: Store, output: Output) -> None:
    """Print how to see the results of an evaluation that runs in the background, and how to stop it."""
    # Name the store: the same command might select a newer checkpoint.
    hint = f"see the results with `grpo-orch eval {store.quoted}`, stop it with `grpo-orch down {store.quoted}`"
    print_result(output, {"store": store.url}, f"The evaluation keeps running in the background; {hint}.")


def _read_results(store: Store, subjects: Sequence[Subject]) -> list[EvaluationResult]:
    found = (evaluations.evaluated(subject.name).read(store) for subject in subjects)
    return [result for result in found if result is not None]


def _show(results: Sequence[EvaluationResult], store: Store, output: Output) -> None:
    if not results:
        raise Stop(f"{store.url} has no results yet", exit_codes.FAILED)
    print_result(output, results_json(results, store.url), results_table(results))
    if output is Output.TEXT:
        print_line(f"Completions and scores: {store.url}/{layout.EVALUATED}/")


# Pins protect checkpoints from their run's retention until they are evaluated.


def pin(parent: Store, subjects: Sequence[Subject]) -> tuple[Subject, ...]:
    """Pin each checkpoint until it is evaluated, unless a user has pinned it already.

    The last evaluation of a checkpoint removes the pin set by the first. Raises Stop if a checkpoint is gone.
    """
    catalog = Catalog(parent, f"{socket.gethostname()}/{os.getpid()}")
    listed, shared = catalog.newest().checkpoints, evaluations.still_needed(parent)
    present = {(checkpoint.version, checkpoint.digest): checkpoint for checkpoint in listed}
    wanted = [subject for subject in subjects if subject.name != BASE]
    if gone := [subject.name for subject in wanted if (subject.name, subject.digest) not in present]:
        hint = f"`grpo-orch checkpoints ls {parent.quoted}` lists the remaining checkpoints"
        raise Stop(f"{', '.join(gone)}: retired in the meantime; {hint}", exit_codes.FAILED)
    pinned: list[Subject] = []
    for subject in subjects:
        checkpoint = present.get((subject.name, subject.digest))
        if checkpoint is None:
            pinned.append(replace(subject, pinned=False))
            continue
        if not checkpoint.pinned:
            catalog.pin(time.time(), checkpoint.at, pinned=True)
        is_ours = subject.pinned or not checkpoint.pinned or checkpoint.version in shared
        pinned.append(replace(subject, pinned=is_ours))
    return tuple(pinned)


# The subjects and problems of an evaluation, and the name and store derived from them.

# An evaluation's name is a digest of its run.yaml without the keys that do not affect answers.
IDLE_KEYS = ("notify", "metrics_port")
IDLE_POLICIES = ("fleet", "kl")
NAMED_MAX = 8  # policies in an evaluation's name, because names of folders are limited


def find_subjects(parent: Store, wanted: Sequence[str], *, base: bool) -> tuple[Subject, ...]:
    """Return the subjects, base first, because the others are loaded over its weights.

    `latest` excludes checkpoints that a rollback has abandoned. Raises Stop.
    """
    listed, forks = Catalog(parent, "eval").newest().checkpoints, read_forks(parent)
    line = lineage(forks, max((fork.timeline for fork in forks), default=0))
    present = [checkpoint for checkpoint in listed if on_lineage(checkpoint.at, line)]
    found = [find_checkpoint(present if text == NEWEST else listed, text) for text in wanted]
    subjects = {
        checkpoint.version: Subject(checkpoint.version, checkpoint.manifest, checkpoint.digest)
        for checkpoint in found
    }
    return (*([Subject(BASE)] if base else []), *(subjects[key] for key in sorted(subjects, key=_order)))


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split("-")))


def find_problems(spec: RunSpec, named: str | None) -> Dataset | tuple[Dataset, ...]:
    """Return the evaluation's dataset. A dataset named by the user gets the run's prompt template. Raises Stop."""
    trainer = spec.trainer
    if named is None:
        if trainer.eval_dataset is None:
            message = "run.yaml has no trainer.eval_dataset; name held-out problems with --dataset"
            raise Stop(message)
        return trainer.eval_dataset
    prompt = datasets_of(trainer.eval_dataset or trainer.dataset)[0].prompt
    path = Path(named).resolve()
    if not os.path.exists(path):  # unlike Path.exists, accepts a name of any length
        if named.startswith((".", "/", "~")) or file_kind(named) is not None:
            raise Stop(f"--dataset {named}: no such file or folder")
        same = (dataset for dataset in datasets_of(trainer.dataset) if dataset.path == named)
        # Evaluate the test split, because the other splits are for training.
        return replace(next(same, Dataset(path=named)), split="test", prompt=prompt, weight=None)
    if path.is_file() and file_kind(path.name) is None:
        raise Stop(f"--dataset {named}: unknown file type; expected one of {', '.join(FILE_KINDS)}")
    workdir = Path(spec.workdir).resolve()
    if spec.cloud != "local" and not path.is_relative_to(workdir):
        message = f"--dataset {named}: machines receive only a copy of {spec.workdir}; put the dataset there"
        raise Stop(message)
    name = str(path) if spec.cloud == "local" else str(path.relative_to(workdir))
    return Dataset(path=name, prompt=prompt)


def run_of(
    parent: Store,
    record: RunRecord,
    subjects: tuple[Subject, ...],
    problems: Dataset | tuple[Dataset, ...],
    rows: int | None,
) -> tuple[Store, RunRecord]:
    """Return the evaluation's store and record, named by what is evaluated and how."""
    evaluation = Evaluation(parent.url, subjects, rows)
    settings = _without_idle_keys(to_builtins(as_run(record.spec, "", problems)))
    identity = to_json([evaluation, settings, _contents(record.spec, problems)])
    names = [subject.name for subject in subjects[:NAMED_MAX]]
    more = [f"{len(subjects) - NAMED_MAX}-more"] if len(subjects) > NAMED_MAX else []
    name = f"{'_'.join(names + more)}-{blake3(identity).hexdigest(4)}"
    store = Store(f"{parent.url}/{layout.evaluation(name)}", retry_s=parent.retry_s)
    spec = as_run(record.spec, store.url, problems)
    run_id = run_id_of(spec.name, store.url)
    return store, RunRecord(documents.SCHEMA, run_id, time.time(), spec, evaluation)


def _without_idle_keys(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec without the keys that do not affect answers, so that they do not change the name."""
    policies = {key: value for key, value in spec["policies"].items() if key not in IDLE_POLICIES}
    answering = {key: value for key, value in spec.items() if key not in IDLE_KEYS}
    return answering | {"policies": policies}


def _contents(spec: RunSpec, problems: Dataset | tuple[Dataset, ...]) -> dict[str, str]:
    """Return digests of the problems' files and of the code in the run's folder, which makes prompts and scores
    and holds tools and environments. Changing any of them makes another evaluation."""
    workdir = Path(spec.workdir)
    packages = [path.parent for path in workdir.glob("*/__init__.py")]
    code = [*workdir.glob("*.py"), *(path for package in packages for path in package.rglob("*.py"))]
    digests: dict[str, str] = {}
    for path in [*(workdir / dataset.path for dataset in datasets_of(problems)), *code]:
        below = files_below(path) if path.is_dir() else [(path.name, path)] if path.is_file() else []
        for name, file in below:
            digests[f"{path}/{name}"] = blake3().update_mmap(file).hexdigest()
    return digests
