"""The command that shows what a step's completions say and what they earned.

A model's completions may hold anything: `shown` writes out what would move the cursor or turn the line, and long
texts are cut in their middle, since answers stand at the end. `-o json` has them whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from checkpoint.records.samples import Message
from checkpoint.store.run_store import Store
from orchestrator.cli.options import AsJson, Output, Stop, Target, console, print_json
from orchestrator.cli.target import open_run
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
from orchestrator.views.words import NOT_KNOWN, short, shown
from policies.model import exit_codes

COUNT, COUNT_MAX = 4, 1000
COLUMNS = 80  # at most: lines of text are hard to read where they are longer
PROMPT = (400, 8)  # characters and lines of a message that are shown
COMPLETION = (1200, 20)
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
    found = _step(store, step)
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


def _step(store: Store, text: str) -> Step:
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
    return [", ".join(part) for part in (by_function, made, left) if part]


def _print_messages(messages: Sequence[Message], chars: int, lines: int) -> None:
    for message in messages[-5:]:
        role = f"{_name(message.role)}: " if message.role else ""
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
