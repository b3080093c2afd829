"""Commands that look at a run and change nothing: status, logs, events, report, plot."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from checkpoint.journal import journal
from checkpoint.records.documents import RunRecord
from checkpoint.records.rehearsals import read_faults
from checkpoint.store.run_store import Store
from orchestrator.cli.options import AsJson, Output, Stop, Target, console, print_json
from orchestrator.cli.remote import controller_of, remote_log
from orchestrator.cli.target import open_run
from orchestrator.clouds import open_cloud
from orchestrator.views import model, screen
from orchestrator.views import report as reports
from orchestrator.views.events import EventLine, event_json, lines, rehearsed_line
from orchestrator.views.report import Report
from orchestrator.views.run_view import Looker
from orchestrator.views.screen import HEIGHT, Screen, plain, wrap
from orchestrator.views.words import clock, going_on
from policies.model import exit_codes
from policies.model.events import JobExited, RunMoved
from policies.model.vocabulary import RunPhase

FOLLOW_EVERY_S = 0.5
LINES_OF_AN_EVENT = 100  # a cloud's whole error among them
ROOM_LEAST = 20  # cells

Follow = Annotated[bool, typer.Option("-f", "--follow", help="Keep printing as more comes.")]


def status(
    target: Target = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Keep watching.")] = False,
    output: AsJson = Output.TEXT,
) -> None:
    """Show a run as it is now, from wherever its store can be read."""
    store, _ = open_run(target)
    if watch and output is Output.TEXT:
        attach(store)
        return
    looker = Looker(store)
    looker.settle()
    while True:
        view = looker.look()
        if output is Output.TEXT:
            console.print(Screen(view, max(HEIGHT, console.height if console.is_terminal else 0)))
        else:
            print_json(model.to_json(view))
        if not watch or view.over:
            return
        time.sleep(FOLLOW_EVERY_S)


def logs(
    node: Annotated[str, typer.Argument(help="A node (rollout-0-i2), its slot (rollout-0), or `daemon`.")],
    target: Target = None,
    follow: Follow = False,
) -> None:
    """Print a node's log, where the run was started; of a run that is `--remote`, the daemon's."""
    store, record = open_run(target)
    try:
        for line in _log(store, record, node, follow):
            console.print(line, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        return


def events(target: Target = None, follow: Follow = False, output: AsJson = Output.TEXT) -> None:
    """Print what happened, from the journal."""
    store, _ = open_run(target)
    try:
        for line in _event_lines(store, follow):
            if output is Output.JSON:
                print_json(event_json(line))
            else:
                _print_event(line)
    except KeyboardInterrupt:
        return


def _print_event(line: EventLine) -> None:
    """On a terminal wrapped between words; else a line each, for other programs to read."""
    when, words = clock(line.time_s), plain(line.text)
    room = console.width - len(when) - 1
    told = wrap(words, room, LINES_OF_AN_EVENT) if console.is_terminal and room >= ROOM_LEAST else [words]
    for place, part in enumerate(told):
        text = f"{' ' * len(when) if place else when} {part}"
        console.print(text, highlight=False, soft_wrap=True)


def report(target: Target = None, output: AsJson = Output.TEXT) -> None:
    """Sum a run up: steps, rewards, faults survived, and what was lost and paid."""
    store, _ = open_run(target)
    built = _report(Looker(store))
    if output is Output.JSON:
        print_json(reports.to_json(built))
    else:
        console.print(reports.render(built))


def plot(
    target: Target = None,
    out: Annotated[Path, typer.Option("--out", help="The PNG to write.")] = Path("plot.png"),
) -> None:
    """Draw reward, held-out score, loss, reward band and KL as a PNG."""
    from orchestrator.views import plots  # matplotlib takes half a second to import; only this command needs it

    store, _ = open_run(target)
    try:
        plots.plot_run(store, out)
    except OSError as error:
        raise Stop(f"{out}: {error.strerror}", exit_codes.USAGE) from None
    console.print(f"Wrote {out}", highlight=False)


def attach(store: Store) -> None:
    """Watch until the run is over, then sum it up; Ctrl-C detaches. Raises Stop when it ended as it should not."""
    looker = Looker(store)
    try:
        screen.watch(looker.look, threading.Event().wait, console)
    except KeyboardInterrupt:
        console.print(
            f"\nDetached; the run goes on. Come back with: grpo-orch status -w {store.quoted}\n"
            f"Stop it with: grpo-orch down {store.quoted}",
            highlight=False,
            soft_wrap=True,
        )
        return
    built = _report(looker)
    console.print(reports.render(built))
    if (stop := _bad_end(built, spec_refused=_spec_was_refused(store))) is not None:
        raise stop


def _spec_was_refused(store: Store) -> bool:
    """Whether work of the run, since it was last started, ended because it cannot be done as run.yaml has it."""
    refused = False
    for record in journal.read(store):
        for event in record.decoded():
            match event:
                case RunMoved(phase=RunPhase.STARTING):
                    refused = False
                case JobExited(
                    exit_code=exit_codes.BAD_SPEC | exit_codes.UNFIT_MACHINE | exit_codes.NOTHING_LEARNT
                ):
                    refused = True
                case _:
                    pass
    return refused


def _bad_end(built: Report, *, spec_refused: bool) -> Stop | None:
    """What to say of a run that has failed, given up, or waits for its user; None for any other."""
    hint = going_on(built.phase, built.reason, built.store)
    match built.phase:
        case RunPhase.FAILED:
            if spec_refused:  # the run keeps the specification that it was created with
                hint += "; a change of run.yaml needs a new run: name another `storage:` in it, then grpo-orch up"
            return Stop(f"{built.name} failed: {built.reason}; {hint}", exit_codes.FAILED)
        case RunPhase.PAUSED:
            return Stop(f"{built.name} is paused: {built.reason}; {hint}", exit_codes.FAILED)
        case RunPhase.GAVE_UP:
            kept = f"; the weights of {built.healthy} are in {built.exported_to}" if built.exported_to else ""
            return Stop(f"{built.name} gave up: {built.reason}{kept}; {hint}", exit_codes.GAVE_UP)
    return None


def _log(store: Store, record: RunRecord, node: str, follow: bool) -> Iterator[str]:
    """The lines of a log. Raises Stop when it is not known here."""
    if (controller := controller_of(record, store)) is not None:
        return remote_log(controller, store, node, follow)
    cloud = open_cloud(record, store)
    try:
        return cloud.log(node, follow=follow)
    except KeyError:
        known = ", ".join(cloud.logged_nodes()) or "none yet"
        raise Stop(f"no log of {node!r}; there are logs of: {known}", exit_codes.USAGE) from None


def _report(looker: Looker) -> Report:
    now_s = looker.settle()
    return reports.build_report(looker.reader, now_s)


def _event_lines(store: Store, follow: bool) -> Iterator[EventLine]:
    """Journal and rehearsed faults, each reading in the order of time."""
    entry, faults = 0, set[int]()
    while True:
        told: list[EventLine] = []
        for record in journal.read(store, entry):
            entry = record.number
            told += lines(record)
        for fault in read_faults(store, known=faults):
            faults.add(fault.number)
            told.append(rehearsed_line(fault))
        yield from sorted(told, key=lambda line: line.time_s)
        if not follow:
            return
        time.sleep(FOLLOW_EVERY_S)
