"""eval: policies of a run on held-out problems, greedy, side by side.

An evaluation is a run of its own, in a store prefix of its own below the evaluated run's: with the same fleet,
and an evaluator instead of the trainer. Its name follows from what it is of, so that the same command again
continues it, or shows its results.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from blake3 import blake3
from msgspec import to_builtins
from rich.table import Table

from checkpoint import journal
from checkpoint.records import documents, evaluations
from checkpoint.records.documents import RunRecord, read_forks
from checkpoint.records.evaluations import Evaluated
from checkpoint.store import layout
from checkpoint.store.codec import to_json
from checkpoint.store.errors import AlreadyExists
from checkpoint.store.probe import probe
from checkpoint.store.run_store import Store
from checkpoint.stream.catalog import Catalog
from checkpoint.stream.manifest import files_below
from orchestrator.cli.checkpoints import NEWEST, find_checkpoint
from orchestrator.cli.options import AsJson, Output, Stop, Target, console, errors, print_json
from orchestrator.cli.remote import is_steered
from orchestrator.cli.start import refuse_missing_secrets, show_plan
from orchestrator.cli.target import open_run
from orchestrator.config.model_size import find_size
from orchestrator.control.launcher import TakenByAnother, start_daemon
from orchestrator.home import keep_run_digest, keep_store_options, run_digest, run_id_of, run_token
from orchestrator.plan.machines import asked_once
from orchestrator.views.words import NOT_KNOWN
from policies.evaluation import intervals
from policies.evaluation.as_run import as_run
from policies.evaluation.intervals import Estimate
from policies.evaluation.judging import Verdict
from policies.model import exit_codes
from policies.model.datasets import FILE_KINDS, file_kind
from policies.model.phases import TERMINAL_RUN
from policies.model.spec import Dataset, RunSpec, datasets_of
from policies.model.timelines import lineage, on_lineage
from policies.model.vocabulary import BASE, Evaluation, RunPhase, Subject

SAID = {
    Verdict.CORRECT: "correct",
    Verdict.WRONG: "right form, wrong",
    Verdict.UNREADABLE: "unreadable",
    Verdict.UNSCORED: "not scored",
}


def results_table(found: Sequence[Evaluated]) -> Table:
    """Shares and mean rewards with their intervals; the last column is the last policy against the first."""
    apart = len(found) > 1
    title = f"greedy, {len(found[0].verdicts)} problems, 95 % intervals"
    made = Table("", *(one.subject for one in found), *(["difference"] if apart else []), title=title)
    for kind in _kinds(found):
        named = SAID[kind] if kind is not Verdict.WRONG or found[0].readable_by else "wrong"
        cells = [_percent(intervals.share(one.verdicts.count(kind), len(one.verdicts))) for one in found]
        if apart:
            first, last = ([one == kind for one in of.verdicts] for of in (found[0], found[-1]))
            cells.append(_percent(intervals.shares_apart(first, last), signed=True))
        made.add_row(named, *cells)
    made.add_section()
    for name in found[0].scores:
        cells = [_number(_mean_score(one.scores[name])) for one in found]
        if apart:
            cells.append(_number(_means_apart(found[0].scores[name], found[-1].scores[name]), signed=True))
        made.add_row(name, *cells)
    made.add_section()
    lengths = [[float(tokens) for tokens in one.tokens] for one in found]
    cells = [_number(intervals.mean(one)) for one in lengths]
    if apart:
        cells.append(_number(intervals.means_apart(lengths[0], lengths[-1]), signed=True))
    made.add_row("tokens", *cells)
    made.add_row("cut off", *(f"{one.cut}" for one in found), *([""] if apart else []))
    return made


def results_json(found: Sequence[Evaluated], store: str) -> dict[str, Any]:
    """The same for programs; shares from 0 to 1."""
    told: dict[str, Any] = {
        "store": store,
        "problems": len(found[0].verdicts),
        "judged_by": found[0].judged_by,
        "readable_by": found[0].readable_by,
        "policies": {one.subject: _policy(one) for one in found},
    }
    if len(found) > 1:
        told["difference"] = _difference(found[0], found[-1])
    return told


def _policy(one: Evaluated) -> dict[str, Any]:
    count = len(one.verdicts)
    return {
        "shares": {kind: asdict(intervals.share(one.verdicts.count(kind), count)) for kind in Verdict},
        "rewards": {name: _plain(_mean_score(scores)) for name, scores in one.scores.items()},
        "tokens": asdict(intervals.mean([float(tokens) for tokens in one.tokens])),
        "cut": one.cut,
    }


def _difference(first: Evaluated, last: Evaluated) -> dict[str, Any]:
    def apart(kind: Verdict) -> Estimate:
        return intervals.shares_apart([v == kind for v in first.verdicts], [v == kind for v in last.verdicts])

    rewards = {name: _plain(_means_apart(first.scores[name], last.scores[name])) for name in first.scores}
    shares = {kind: asdict(apart(kind)) for kind in Verdict}
    return {"of": [first.subject, last.subject], "shares": shares, "rewards": rewards}


def _kinds(found: Sequence[Evaluated]) -> list[Verdict]:
    """Those that can be told apart here, and of the last what there is."""
    there = {verdict for one in found for verdict in one.verdicts}
    kinds = [Verdict.CORRECT, Verdict.WRONG]
    if found[0].readable_by:
        kinds.append(Verdict.UNREADABLE)
    return [*kinds, *([Verdict.UNSCORED] if Verdict.UNSCORED in there else [])]


def _mean_score(scores: Sequence[float | None]) -> Estimate | None:
    there = [one for one in scores if one is not None]
    return intervals.mean(there) if there else None


def _means_apart(before: Sequence[float | None], after: Sequence[float | None]) -> Estimate | None:
    """Over what has a score on both sides."""
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    return intervals.means_apart([a for a, _ in pairs], [b for _, b in pairs]) if pairs else None


def _plain(one: Estimate | None) -> dict[str, float] | None:
    return None if one is None else asdict(one)


def _percent(one: Estimate, *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return f"{100 * one.value:{sign}.1f} % ({100 * one.low:{sign}.1f} to {100 * one.high:{sign}.1f})"


def _number(one: Estimate | None, *, signed: bool = False) -> str:
    if one is None:
        return NOT_KNOWN
    sign = "+" if signed else ""
    return f"{one.value:{sign}.3f} ({one.low:{sign}.3f} to {one.high:{sign}.3f})"


# The command.

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
    if record.spec.trainer.agent is not None:
        why = "eval scores single answers, and this run's completions are an agent's (trainer.agent)"
        raise Stop(why, exit_codes.USAGE)
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
            stored = evaluations.count_kept(store) if beat is not None else 0
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
    read = (evaluations.evaluated(one.name).read(store) for one in subjects)
    return [one for one in read if one is not None]


def _show(found: Sequence[Evaluated], store: Store, output: Output) -> None:
    if not found:
        raise Stop(f"{store.url} has no results yet", exit_codes.FAILED)
    if output is Output.JSON:
        print_json(results_json(found, store.url))
        return
    console.print(results_table(found), highlight=False)
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


# What an evaluation is of: policies, problems, and the name and store that follow from them.

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
    """Digests of the files with problems, and of the modules and packages in the run's folder, which make prompts,
    score, and are tools or environments. With others it is another evaluation."""
    workdir = Path(spec.workdir)
    packages = [one.parent for one in workdir.glob("*/__init__.py")]
    code = [*workdir.glob("*.py"), *(path for one in packages for path in one.rglob("*.py"))]
    found: dict[str, str] = {}
    for path in [*(workdir / one.path for one in datasets_of(problems)), *code]:
        below = files_below(path) if path.is_dir() else [(path.name, path)] if path.is_file() else []
        for name, file in below:
            found[f"{path}/{name}"] = blake3().update_mmap(file).hexdigest()
    return found
