"""Commands that look at a run and change nothing: status, logs, events, report, plot, samples, web."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from checkpoint import journal
from checkpoint.records.documents import RunRecord, read_faults
from checkpoint.records.samples import Message
from checkpoint.store.run_store import Store
from orchestrator.cli.options import AsJson, Output, Stop, Target, console, print_json
from orchestrator.cli.remote import controller_of, remote_log
from orchestrator.cli.target import open_run
from orchestrator.clouds import open_cloud
from orchestrator.samples import (
    Found,
    NoSamples,
    Order,
    Step,
    Summary,
    Wanted,
    choose,
    completion_plain,
    find_step,
    groups_of,
    messages_plain,
    stored_steps,
    summary_plain,
    why_none,
)
from orchestrator.views import model, screen
from orchestrator.views import report as reports
from orchestrator.views.events import EventLine, event_json, lines, rehearsed_line
from orchestrator.views.report import Report
from orchestrator.views.run_view import Looker
from orchestrator.views.screen import HEIGHT, Screen
from orchestrator.views.words import NOT_KNOWN, clock, going_on, plain, short, shown, wrap
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


# samples. A model's completions may hold anything: `shown` writes out what would move the cursor or turn the
# line, and long texts are cut in their middle, since answers stand at the end. `-o json` has them whole.

COUNT, COUNT_MAX = 4, 1000
COLUMNS = 80  # at most: lines of text are hard to read where they are longer
PROMPT = (400, 8)  # characters and lines of a message that are shown
COMPLETION = (1200, 20)
MESSAGES = 5  # of a prompt or completion: its last ones
NAME_MAX = 60  # characters


def samples(
    target: Target = None,
    step: Annotated[str, typer.Option("--step", help="A step, or TIMELINE-STEP; default: the newest.")] = "",
    worst: Annotated[bool, typer.Option("--worst", help="Those with the lowest reward first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Those with the highest reward first.")] = False,
    search: Annotated[str, typer.Option("--search", help="Only where prompt or completion has this text.")] = "",
    count: Annotated[int, typer.Option("-n", min=1, max=COUNT_MAX, help="How many completions.")] = COUNT,
    output: AsJson = Output.TEXT,
) -> None:
    """Show completions of a step: prompt, text, rewards, advantage, and where they were made."""
    if worst and best:
        raise Stop("--worst and --best: one of them", exit_codes.USAGE)
    order = Order.WORST if worst else Order.BEST if best else Order.STORED
    store, _ = open_run(target)
    found = _step_of(store, step)
    chosen, told = choose(found, groups_of(store, found), Wanted(search=search), order, count)
    if output is Output.JSON:
        listed = [{**completion_plain(one), "prompt": messages_plain(one.group.prompt)} for one in chosen]
        print_json({**summary_plain(found, told), "completions": listed})
        return
    _print(_headline(found, told), "bold")
    before = None
    for one in chosen:
        _print("")
        _print_one(one, with_prompt=one.link.group != before)
        before = one.link.group
    if not chosen:
        _print("nothing in them has that text")
    elif told.matching > len(chosen):
        _print(f"\n{told.matching - len(chosen):,} more; -n COUNT shows more of them")


def _step_of(store: Store, text: str) -> Step:
    """Raises Stop."""
    steps = stored_steps(store)
    if not steps:
        raise Stop(why_none(store), exit_codes.USAGE)
    try:
        return find_step(steps, text)
    except NoSamples as error:
        raise Stop(shown(str(error)), exit_codes.USAGE) from None


def _headline(step: Step, told: Summary) -> str:
    rewards = f"reward {short(told.reward_min)} to {short(told.reward_max)}, mean {short(told.reward_mean)}"
    handed = f", {told.handed_over:,} handed over" if told.handed_over else ""
    return (
        f"step {step}: {told.completions:,} completions of {told.prompts:,} prompts, {rewards}; "
        f"{told.cut:,} cut{handed}"
    )


def _print_one(one: Found, *, with_prompt: bool) -> None:
    sample = one.sample
    _print(f"{one.link}  reward {short(sample.reward)}  advantage {short(sample.advantage)}", "bold")
    for line in _facts(completion_plain(one)):
        _print(line, "dim")
    if with_prompt:
        _print("prompt", "cyan")
        _print_messages(one.group.prompt, *PROMPT)
    _print("completion", "green")
    _print_messages(sample.completion, *COMPLETION)


def _facts(one: dict[str, Any]) -> list[str]:
    """What is known of a completion beside its text."""
    if one["refused"]:
        return [f"no node took the prompt: {_name(one['refused'])}"]
    by_function = [f"{_name(part['function'])} {short(part['reward'])}" for part in one["rewards"]]
    tokens = NOT_KNOWN if one["tokens"] is None else f"{one['tokens']:,}"
    made = [f"{tokens} tokens{', cut' if one['cut'] else ''}"]
    made += [f"on {_name(one['node'])}"] if one["node"] else []
    made += [f"policy {_name(one['policy'].partition('@')[0])}"] if one["policy"] else []
    if one["mismatch_mean"] is not None:
        made.append(f"mismatch {short(one['mismatch_mean'])} mean, {short(one['mismatch_max'])} most")
    left = [f"left {_name(part['node'])} after {part['tokens']:,} tokens" for part in one["handed_over"][:5]]
    failed = [f"the agent failed: {_name(one['failed'])}"] if one["failed"] else []
    return [", ".join(part) for part in (by_function, made, left, failed) if part]


def _print_messages(messages: Sequence[Message], chars: int, lines: int) -> None:
    if len(messages) > MESSAGES:
        _print(f"  {len(messages) - MESSAGES} messages before", "dim")
    for message in messages[-MESSAGES:]:
        tokens = "" if message.tokens is None else f" ({message.tokens:,} tokens)"
        role = f"{_name(message.role)}{tokens}: " if message.role else ""
        text = f"{role}{excerpt(message, chars, lines)}"
        for line in Text(text).wrap(console, _columns() - 2, overflow="fold"):
            line.rstrip()
            console.print(Text("  ") + line)


def excerpt(message: Message, chars: int, lines: int) -> str:
    """The text for a terminal, in at most about so many characters and lines: its beginning and its end."""
    text, left_out = message.text, message.left_out
    if len(text) > chars:
        head, end = text[: chars * 2 // 3], text[-(chars // 3) :]
        left_out += len(text) - len(head) - len(end)
    else:
        head, end = (
            (text[: len(text) - message.after], text[len(text) - message.after :]) if left_out else (text, "")
        )
    head, end = shown(head), shown(end)
    if left_out:
        head = f"{head} [{left_out:,} characters left out] "
    found = (head + end).split("\n")
    if len(found) > lines:
        most = lines * 2 // 3
        found = [*found[:most], f"[{len(found) - lines:,} lines left out]", *found[most - lines :]]
    return "\n".join(found)


def _name(text: str) -> str:
    return shown(text, NAME_MAX).replace("\n", " ")


def _print(text: str, style: str = "") -> None:
    for line in Text(text, style).wrap(console, _columns(), overflow="fold"):
        line.rstrip()
        console.print(line)


def _columns() -> int:
    return min(console.width, COLUMNS)


# web


def web(
    target: Target = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Default: 8642, or another that is free.")
    ] = None,
    output: AsJson = Output.TEXT,
) -> None:
    """Show a run in a browser, live, from wherever its store can be read; Ctrl-C ends it."""
    from orchestrator.web.server import HERE, serve  # no other command needs what it imports

    store, record = open_run(target)

    def tell(url: str) -> None:
        if output is Output.JSON:
            print_json({"url": url})
            return
        console.print(f"{record.spec.name}: {url}", highlight=False, soft_wrap=True)

    try:
        serve(store, port, tell)
    except OSError as error:
        raise Stop(f"cannot listen on {HERE}: {error.strerror or error}", exit_codes.USAGE) from None
