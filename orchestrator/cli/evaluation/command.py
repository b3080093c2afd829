"""eval: policies of a run on held-out problems, greedy, side by side.

An evaluation is a run of its own, in a store prefix of its own below the evaluated run's: with the same fleet, and
an evaluator in the place of the trainer. Its name follows from what it is of, so that the same command again goes
on with it, or shows what it found.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from checkpoint.journal import journal
from checkpoint.records import documents, evaluated, evaluations
from checkpoint.records.documents import RunRecord
from checkpoint.records.evaluated import Evaluated
from checkpoint.store import layout
from checkpoint.store.errors import AlreadyExists
from checkpoint.store.probe import probe
from checkpoint.store.run_store import Store
from checkpoint.stream.catalog import Catalog
from orchestrator.cli.checkpoints import NEWEST
from orchestrator.cli.console import Stop, console, errors
from orchestrator.cli.evaluation.question import find_problems, find_subjects, run_of
from orchestrator.cli.options import AsJson, Output, Target, print_json
from orchestrator.cli.steering.remote import is_steered
from orchestrator.cli.steering.rollback import refuse_missing_secrets
from orchestrator.cli.steering.start import show_plan
from orchestrator.cli.target import open_run
from orchestrator.config.model_size import find_size
from orchestrator.control.launcher import TakenByAnother, start_daemon
from orchestrator.home.folder import keep_run_digest, keep_store_options, run_token
from orchestrator.home.trust import run_digest
from orchestrator.plan.models import asked_once
from orchestrator.views import evaluation as views
from policies.model import exit_codes
from policies.model.evaluation import BASE, Subject
from policies.model.phases import TERMINAL_RUN
from policies.model.vocabulary import RunPhase

POLL_S = 2.0  # each look is some eight requests, and whoever waits has minutes to wait

Steps = Annotated[
    list[str] | None, typer.Option("--step", help="A checkpoint, as `200` or `1-200`. May be given several times.")
]
Rows = Annotated[int | None, typer.Option("--rows", min=1, help="Only so many problems, from the first on.")]
Detach = Annotated[bool, typer.Option("-d", "--detach", help="Do not wait; it tells how to see what comes out.")]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Start without asking.")]


def evaluate(
    target: Target = None,
    step: Steps = None,
    base: Annotated[bool, typer.Option("--base", help="The model that training began from.")] = False,
    final: Annotated[bool, typer.Option("--final", help="The newest checkpoint.")] = False,
    dataset: Annotated[
        str | None, typer.Option(help="A file, or a dataset's name; default: trainer.eval_dataset.")
    ] = None,
    rows: Rows = None,
    yes: Yes = False,
    detach: Detach = False,
    output: AsJson = Output.TEXT,
) -> None:
    """Evaluate policies of a run, greedily, on held-out problems: by default the base model and the newest
    checkpoint, side by side."""
    parent, record = open_run(target)
    if record.evaluation is not None:
        _show(_found(parent, record.evaluation.subjects), parent, output)
        return
    wanted = [*(step or []), *([NEWEST] if final else [])]
    if not wanted and not base:
        wanted, base = [NEWEST], True
    subjects = find_subjects(parent, wanted, base=base)
    problems = find_problems(record.spec, dataset)
    store, made = run_of(parent, record, subjects, problems, rows)
    if store.get_or_none(layout.RUN) is None:
        _create(parent, store, made, yes=yes)
    made = documents.read_run(store)
    if len(_found(store, subjects)) < len(subjects):
        _start(store, made)
        if detach:
            _say_where(store, output)
            return
        try:
            _wait(store, subjects)
        except KeyboardInterrupt:
            _say_where(store, output)
            return
    _show(_found(store, subjects), store, output)


def _create(parent: Store, store: Store, record: RunRecord, *, yes: bool) -> None:
    """Write the evaluation's run.json. Raises Stop where the user does not want it."""
    refuse_missing_secrets(record.spec)
    probe(store)
    show_plan(record, store, None, asked_once(find_size), errors)
    if not yes and not typer.confirm("Evaluate?", default=True, err=True):
        raise Stop("nothing was started", exit_codes.OK)
    if store.options:
        keep_store_options(store.url, {key: str(value) for key, value in store.options.items()})
    assert record.evaluation is not None
    pinned = replace(record.evaluation, subjects=pin(parent, record.evaluation.subjects))
    try:
        data = documents.create_run(store, replace(record, evaluation=pinned))
        keep_run_digest(store.url, run_digest(data))
        pin(parent, pinned.subjects)  # another may have been done meanwhile, that did not know of this one
    except AlreadyExists:  # by the same command elsewhere, at this moment
        console.print(f"{store.url} was begun by another.", soft_wrap=True)


def _start(store: Store, record: RunRecord) -> None:
    """Have a daemon steer it, unless one does."""
    if is_steered(store):
        return
    refuse_missing_secrets(record.spec)
    run_token(record.run_id)
    begun = journal.recover(store).state.name
    with contextlib.suppress(TakenByAnother):  # by the same command elsewhere
        start_daemon(store, record, "resume" if begun else "up")


def _wait(store: Store, subjects: Sequence[Subject]) -> None:
    """Return once all is there. Raises Stop where it ended before."""
    with errors.status("waiting for machines") as status:
        while True:
            there = len(_found(store, subjects))
            state = journal.recover(store).state
            ended = state.phase in TERMINAL_RUN and not state.nodes
            if ended and state.phase is RunPhase.FINISHED and there == len(subjects):
                return
            if ended or not is_steered(store):
                break
            beat = documents.TRAINER.read(store)
            activity = "waiting for machines" if beat is None else beat.activity
            stored = evaluated.count_kept(store) if beat is not None else 0
            status.update(f"{there} of {len(subjects)} policies; {activity}; {stored} completions stored")
            time.sleep(POLL_S)
    if len(_found(store, subjects)) == len(subjects):
        return
    why = state.reason if ended else "nobody steers it any more"
    again = f"`grpo-orch logs trainer-0 {store.quoted}` says more; the same command goes on with it"
    raise Stop(f"the evaluation in {store.url}: {why}; {again}", exit_codes.FAILED)


def _say_where(store: Store, output: Output) -> None:
    """It goes on by itself."""
    if output is Output.JSON:
        print_json({"store": store.url})
        return
    # Not the same command: the newest checkpoint may be another by then.
    shows, ends = (
        f"`grpo-orch eval {store.quoted}` shows what comes out",
        f"`grpo-orch down {store.quoted}` ends it",
    )
    told = f"It goes on by itself; {shows}, {ends}."
    console.print(told, highlight=False, soft_wrap=True)


def _found(store: Store, subjects: Sequence[Subject]) -> list[Evaluated]:
    read = (evaluated.evaluated(one.name).read(store) for one in subjects)
    return [one for one in read if one is not None]


def _show(found: Sequence[Evaluated], store: Store, output: Output) -> None:
    if not found:
        raise Stop(f"{store.url} has no results yet", exit_codes.FAILED)
    if output is Output.JSON:
        print_json(views.to_json(found, store.url))
        return
    console.print(views.table(found), highlight=False)
    told = f"Each completion with its scores: {store.url}/{layout.EVALUATED}/"
    console.print(told, highlight=False, soft_wrap=True)


# Evaluated checkpoints are kept from their run's retention until they are evaluated.


def pin(parent: Store, subjects: Sequence[Subject]) -> tuple[Subject, ...]:
    """Keep each checkpoint from its run's retention until it is evaluated, unless somebody keeps it already.

    The last evaluation of a checkpoint unpins what the first has pinned. Raises Stop where one is gone.
    """
    catalog = Catalog(parent, f"{socket.gethostname()}/{os.getpid()}")
    listed, shared = catalog.newest().checkpoints, _pinned_by_others(parent)
    there = {(one.version, one.digest): one for one in listed}
    if gone := [one.name for one in subjects if one.name != BASE and (one.name, one.digest) not in there]:
        hint = f"`grpo-orch checkpoints ls {parent.quoted}` shows what is left"
        raise Stop(f"{', '.join(gone)}: retired meanwhile; {hint}", exit_codes.FAILED)
    made: list[Subject] = []
    for subject in subjects:
        one = there.get((subject.name, subject.digest))
        if one is not None and not one.pinned:
            catalog.pin(time.time(), one.at, pinned=True)
        ours = one is not None and (subject.pinned or not one.pinned or one.version in shared)
        made.append(replace(subject, pinned=ours))
    return tuple(made)


def _pinned_by_others(parent: Store) -> set[str]:
    """The checkpoints that evaluations which are not done have pinned."""
    return {
        subject.name
        for store, evaluation in evaluations.of_run(parent)
        if journal.recover(store).state.phase is not RunPhase.FINISHED
        for subject in evaluation.subjects
        if subject.pinned
    }
