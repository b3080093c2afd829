"""Read-only commands: status, logs, events, report, plot, samples, web."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.records.samples import Message
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.cli.options import (
    AsJson,
    Output,
    Stop,
    Target,
    console,
    print_json,
    print_line,
    print_result,
    text_terminal,
)
from grpo_orch.orchestrator.cli.remote import controller_of, remote_log
from grpo_orch.orchestrator.cli.target import open_run
from grpo_orch.orchestrator.clouds import open_cloud
from grpo_orch.orchestrator.samples import (
    FoundSample,
    NoSamples,
    SampleFilter,
    SortOrder,
    Step,
    Summary,
    completion_plain,
    find_step,
    groups_of,
    messages_plain,
    no_samples_reason,
    select,
    stored_steps,
    summary_plain,
)
from grpo_orch.orchestrator.views import report as reports
from grpo_orch.orchestrator.views import screen, view_model
from grpo_orch.orchestrator.views.events import EventLine, event_json
from grpo_orch.orchestrator.views.formatting import (
    UNKNOWN_TEXT,
    clock,
    continue_command,
    escape_invisible,
    plain,
    short,
)
from grpo_orch.orchestrator.views.reader import Reader
from grpo_orch.orchestrator.views.report import Report
from grpo_orch.orchestrator.views.run_view import RunObserver
from grpo_orch.orchestrator.views.screen import HEIGHT, Screen
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.vocabulary import RunPhase

FOLLOW_EVERY_S = 0.5

Follow = Annotated[bool, typer.Option("-f", "--follow", help="Keep printing new lines.")]


def status(
    target: Target = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Refresh until the run ends.")] = False,
    output: AsJson = Output.TEXT,
) -> None:
    """Show the current state of a run, from any machine that can read its store."""
    store, _ = open_run(target)
    if watch and output is Output.TEXT:
        attach(store)
        return
    looker = RunObserver(store)
    looker.settle()
    while True:
        view = looker.observe()
        if output is Output.TEXT:
            console.print(Screen(view, max(HEIGHT, console.height if console.is_terminal else 0)))
        else:
            print_json(view_model.to_json(view))
        if not watch or view.over:
            return
        time.sleep(FOLLOW_EVERY_S)


def logs(
    node: Annotated[str, typer.Argument(help="A node (rollout-0), a machine of it (rollout-0-i2), or `daemon`.")],
    target: Target = None,
    follow: Follow = False,
) -> None:
    """Print the log of a node or of the daemon, on the machine that started the run.

    For a run started with --remote, only the daemon's log is available.
    """
    store, record = open_run(target)
    try:
        for line in _log(store, record, node, follow):
            print_line(line)
    except KeyboardInterrupt:
        return


def events(target: Target = None, follow: Follow = False, output: AsJson = Output.TEXT) -> None:
    """Print the run's events, from its journal."""
    store, _ = open_run(target)
    try:
        for line in _event_lines(store, follow):
            print_result(output, event_json(line), f"{clock(line.time_s)} {plain(line.text)}")
    except KeyboardInterrupt:
        return


def report(target: Target = None, output: AsJson = Output.TEXT) -> None:
    """Summarize a run: steps, rewards, faults survived, lost work and cost."""
    store, _ = open_run(target)
    built = _report(store)
    print_result(output, asdict(built), reports.render(built))


def plot(
    target: Target = None,
    out: Annotated[Path, typer.Option("--out", help="The PNG to write.")] = Path("plot.png"),
    output: AsJson = Output.TEXT,
) -> None:
    """Plot reward, held-out score, loss, reward range and KL as a PNG."""
    from grpo_orch.orchestrator.views import plots  # matplotlib takes half a second to import

    store, _ = open_run(target)
    try:
        plots.plot_run(store, out)
    except OSError as error:
        raise Stop(f"{out}: {error.strerror}") from None
    print_result(output, {"files": [str(out)]}, f"Wrote {out}")


def attach(store: Store, output: Output = Output.TEXT) -> None:
    """Watch the run until it ends, then print its report; Ctrl-C detaches. Raises Stop if it ended badly."""
    looker = RunObserver(store)
    try:
        with ctrl_c() as pressed:
            if output is Output.JSON:
                while not looker.observe().over and not pressed.wait(FOLLOW_EVERY_S):
                    pass
            else:
                screen.watch(looker.observe, pressed.wait, console)
    except KeyboardInterrupt:
        print_line(
            f"\nDetached; the run continues. Attach again with: grpo-orch status -w {store.quoted}\n"
            f"Stop it with: grpo-orch down {store.quoted}",
            text_terminal(output),
        )
        return
    built = _report(store)
    print_result(output, asdict(built), reports.render(built))
    if (stop := _bad_end(built)) is not None:
        raise stop


@contextlib.contextmanager
def ctrl_c() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets, and raise KeyboardInterrupt at the latest at the end of the context.

    Python raises it wherever the main thread is, and drops it in a destructor or a callback.
    """
    pressed = threading.Event()

    def press(*_: object) -> None:
        pressed.set()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # it gets no signals
        yield pressed
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
        if pressed.is_set():
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


def _bad_end(built: Report) -> Stop | None:
    """Return the error of a run that failed, gave up or is paused; None for any other."""
    hint = continue_command(built.phase, built.reason, built.store)
    match built.phase:
        case RunPhase.FAILED:
            return Stop(f"{built.name} failed: {built.reason}; {hint}", exit_codes.FAILED)
        case RunPhase.PAUSED:
            return Stop(f"{built.name} is paused: {built.reason}; {hint}", exit_codes.FAILED)
        case RunPhase.GAVE_UP:
            return Stop(f"{built.name} gave up: {built.reason}; {hint}", exit_codes.GAVE_UP)
    return None


def _log(store: Store, record: RunRecord, node: str, follow: bool) -> Iterator[str]:
    """Return the lines of a log. Raises Stop if this machine does not have it."""
    if (controller := controller_of(record, store)) is not None:
        return remote_log(controller, store, node, follow)
    cloud = open_cloud(record, store)
    try:
        return cloud.log(node, follow=follow)
    except KeyError:
        known = ", ".join(cloud.logged_nodes()) or "none yet"
        raise Stop(f"no log of {node!r}; available logs: {known}") from None


def _report(store: Store) -> Report:
    observer = RunObserver(store, whole=True)
    now_s = observer.settle()
    return reports.build_report(observer.reader, now_s)


def _event_lines(store: Store, follow: bool) -> Iterator[EventLine]:
    """Yield journal entries and rehearsed faults, sorted by time within each poll."""
    reader, shown = Reader(store, whole=True), 0
    while True:
        reader.read_journal()
        yield from reader.events[shown:]
        shown = len(reader.events)
        if not follow:
            return
        time.sleep(FOLLOW_EVERY_S)


# samples. Completions may contain any characters: `escape_invisible` escapes those that move the cursor or change
# direction. Long texts are cut in the middle, because answers are at the end. `-o json` prints them whole.

COUNT, COUNT_MAX = 4, 1000
COLUMNS_MAX = 80  # longer lines of text are hard to read
PROMPT = (400, 8)  # characters and lines of a message that are shown
COMPLETION = (1200, 20)
MESSAGES_MAX = 5  # the last messages of a prompt or completion
NAME_MAX = 60  # characters


def samples(
    target: Target = None,
    step: Annotated[str, typer.Option("--step", help="A step, or TIMELINE-STEP; default: the newest.")] = "",
    worst: Annotated[bool, typer.Option("--worst", help="Sort by reward, lowest first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Sort by reward, highest first.")] = False,
    search: Annotated[str, typer.Option("--search", help="Only prompts or completions with this text.")] = "",
    count: Annotated[int, typer.Option("-n", min=1, max=COUNT_MAX, help="Number of completions.")] = COUNT,
    output: AsJson = Output.TEXT,
) -> None:
    """Show completions of a step: prompt, text, rewards, advantage, node and policy."""
    if worst and best:
        raise Stop("--worst and --best are mutually exclusive")
    order = SortOrder.WORST if worst else SortOrder.BEST if best else SortOrder.STORED
    store, _ = open_run(target)
    found = _step_of(store, step)
    chosen, summary = select(found, groups_of(store, found), SampleFilter(search=search), order, count)
    if output is Output.JSON:
        listed = [{**completion_plain(item), "prompt": messages_plain(item.group.prompt)} for item in chosen]
        print_json({**summary_plain(found, summary), "completions": listed})
        return
    _print(_headline(found, summary), "bold")
    group = None
    for item in chosen:
        _print("")
        _print_completion(item, with_prompt=item.link.group != group)
        group = item.link.group
    if not chosen:
        _print("no completion or prompt contains that text")
    elif summary.matching > len(chosen):
        _print(f"\n{summary.matching - len(chosen):,} more; show them with -n COUNT")


def _step_of(store: Store, text: str) -> Step:
    """Return the step that `text` names. Raises Stop."""
    steps = stored_steps(store)
    if not steps:
        raise Stop(no_samples_reason(store))
    try:
        return find_step(steps, text)
    except NoSamples as error:
        raise Stop(escape_invisible(str(error))) from None


def _headline(step: Step, summary: Summary) -> str:
    mean = short(summary.reward_mean)
    rewards = f"reward {short(summary.reward_min)} to {short(summary.reward_max)}, mean {mean}"
    handed = f", {summary.handed_over:,} handed over" if summary.handed_over else ""
    return (
        f"step {step}: {summary.completions:,} completions of {summary.prompts:,} prompts, {rewards}; "
        f"{summary.cut:,} cut{handed}"
    )


def _print_completion(item: FoundSample, *, with_prompt: bool) -> None:
    sample = item.sample
    _print(f"{item.link}  reward {short(sample.reward)}  advantage {short(sample.advantage)}", "bold")
    for line in _facts(completion_plain(item)):
        _print(line, "dim")
    if with_prompt:
        _print("prompt", "cyan")
        _print_messages(item.group.prompt, *PROMPT)
    _print("completion", "green")
    _print_messages(sample.completion, *COMPLETION)


def _facts(item: dict[str, Any]) -> list[str]:
    """Return the lines about a completion that precede its text."""
    if item["refused"]:
        return [f"no node accepted the prompt: {_name(item['refused'])}"]
    by_function = [f"{_name(part['function'])} {short(part['reward'])}" for part in item["rewards"]]
    tokens = UNKNOWN_TEXT if item["tokens"] is None else f"{item['tokens']:,}"
    origin = [f"{tokens} tokens{', cut' if item['cut'] else ''}"]
    origin += [f"on {_name(item['node'])}"] if item["node"] else []
    origin += [f"policy {_name(item['policy'].partition('@')[0])}"] if item["policy"] else []
    if item["mismatch_mean"] is not None:
        origin.append(f"mismatch {short(item['mismatch_mean'])} mean, {short(item['mismatch_max'])} max")
    left = [f"left {_name(part['node'])} after {part['tokens']:,} tokens" for part in item["handed_over"][:5]]
    failed = [f"the agent failed: {_name(item['failed'])}"] if item["failed"] else []
    return [", ".join(part) for part in (by_function, origin, left, failed) if part]


def _print_messages(messages: Sequence[Message], chars: int, lines: int) -> None:
    if len(messages) > MESSAGES_MAX:
        _print(f"  {len(messages) - MESSAGES_MAX} earlier messages", "dim")
    for message in messages[-MESSAGES_MAX:]:
        tokens = "" if message.tokens is None else f" ({message.tokens:,} tokens)"
        role = f"{_name(message.role)}{tokens}: " if message.role else ""
        text = f"{role}{excerpt(message, chars, lines)}"
        for line in Text(text).wrap(console, _columns() - 2, overflow="fold"):
            line.rstrip()
            console.print(Text("  ") + line)


def excerpt(message: Message, chars: int, lines: int) -> str:
    """Return the beginning and the end of the text, in about `chars` characters and at most `lines` lines."""
    text, left_out = message.text, message.left_out
    if len(text) > chars:
        head, end = text[: chars * 2 // 3], text[-(chars // 3) :]
        left_out += len(text) - len(head) - len(end)
    else:
        head, end = (
            (text[: len(text) - message.after], text[len(text) - message.after :]) if left_out else (text, "")
        )
    head, end = escape_invisible(head), escape_invisible(end)
    if left_out:
        head = f"{head} [{left_out:,} characters left out] "
    shown_lines = (head + end).split("\n")
    if len(shown_lines) > lines:
        first = lines * 2 // 3
        left_out_lines = f"[{len(shown_lines) - lines:,} lines left out]"
        shown_lines = [*shown_lines[:first], left_out_lines, *shown_lines[first - lines :]]
    return "\n".join(shown_lines)


def _name(text: str) -> str:
    return escape_invisible(text, NAME_MAX).replace("\n", " ")


def _print(text: str, style: str = "") -> None:
    for line in Text(text, style).wrap(console, _columns(), overflow="fold"):
        line.rstrip()
        console.print(line)


def _columns() -> int:
    return min(console.width, COLUMNS_MAX)


# web


def web(
    target: Target = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Port. Default: 8642, or any free port.")
    ] = None,
    output: AsJson = Output.TEXT,
) -> None:
    """Serve a live web page of a run, from any machine that can read its store. Stop it with Ctrl-C."""
    from grpo_orch.orchestrator.web.app import LOOPBACK, serve  # slow to import, and only needed here

    store, record = open_run(target)

    name = record.spec.name
    try:
        serve(store, port, lambda url: print_result(output, {"url": url}, f"{name}: {url}"))
    except OSError as error:
        raise Stop(f"cannot listen on {LOOPBACK}: {error.strerror or error}") from None
