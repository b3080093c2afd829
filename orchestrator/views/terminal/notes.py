"""Facts of a line or two: what is off, dollars, where a step's time goes, what weights take, what comes."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text

from orchestrator.views.measured import StepSplit, stages_words, weights_words
from orchestrator.views.model import FleetView, MoneyView, RunView, deadline_words, is_late
from orchestrator.views.terminal.lines import LABEL, cut, joined, labelled, left
from orchestrator.views.words import duration, short, usd
from policies.detect.divergence import Health

TROUBLE_LINES = 2
BAR_MIN, BAR_MOST = 8, 60  # cells


def trouble(view: RunView, width: int) -> list[Text]:
    """Where not all is well: what is off, how far a rollback is, what is not bought and why."""
    health, rollback, told = view.health, view.rollback, list[Text]()
    if health.health is not Health.HEALTHY:
        tripped = health.health is Health.TRIPPED
        since = f"since step {health.onset_step}, seen at step {health.step}"
        words = f"{since}: {'; '.join(health.evidence)}" if health.evidence else since
        label, style = ("diverged", "bold red") if tripped else ("watched", "yellow")
        told += labelled(label, words, width, TROUBLE_LINES, style)
    if rollback is not None:
        passed_s = duration(view.now_s - rollback.since_s)
        words = f"timeline {rollback.timeline}, from {rollback.start or 'the start'}, {rollback.text} ({passed_s})"
        told += labelled("rollback", words, width, TROUBLE_LINES, "cyan")
    for one in view.not_bought:
        wait_s = duration(max(0.0, one.tried_again_s - view.now_s))
        words = f"{one.kind}, one is tried in {wait_s}: {one.reason}"
        told += labelled("not bought", words, width, TROUBLE_LINES, "bold red")
    return told


def money(view: MoneyView, width: int) -> list[Text]:
    """Dollars: spent, at the end, saved, a step; whole figures only."""
    if view.spent_usd <= 0:
        return []
    words = [f"{usd(view.spent_usd)} spent" + (f" of {usd(view.budget_usd)}" if view.budget_usd else "")]
    if view.forecast_usd is not None:
        words.append(f"{usd(view.forecast_usd)} at the end")
    if (saved_usd := view.all_on_demand_usd - view.spent_usd) >= 0.005:
        words.append(f"{usd(saved_usd)} saved")
    if view.usd_per_step is not None:
        words.append(f"{usd(view.usd_per_step)} a step")
    if view.usd_per_million_tokens is not None:
        words.append(f"{usd(view.usd_per_million_tokens)}/M tokens")
    return labelled("money", joined(words, width - LABEL), width)


def deadline(view: RunView, width: int) -> list[Text]:
    """How far the run is on the way to its deadline."""
    words = deadline_words(view)
    if not words:
        return []
    return labelled("deadline", joined(words, width - LABEL), width, style="yellow" if is_late(view) else "")


def step(split: StepSplit | None, width: int) -> list[Text]:
    """Where a step's time goes: one bar, whose parts are told apart by what fills them, not by colour alone."""
    if split is None or split.step_s <= 0:
        return []
    parts = [
        ("█", "green", "generate", split.generate_s),
        ("▓", "blue", "train", split.train_s),
        ("▒", "magenta", "publish", split.publish_s),
        ("░", "red", "wait", split.wait_s),
    ]
    parts = [part for part in parts if part[3] >= 0.0005 * split.step_s]
    keys = [f" {glyph} {name} {short(seconds)} s" for glyph, _, name, seconds in parts]
    room = min(BAR_MOST, width - LABEL - sum(map(cell_len, keys)))
    line = Text(left("step", LABEL), no_wrap=True)
    if room >= BAR_MIN:
        done, end_s = 0, 0.0
        for glyph, style, _, seconds in parts:
            end_s += seconds
            end = round(room * end_s / split.step_s)
            line.append(glyph * (end - done), style)
            done = end
    elif sum(map(cell_len, keys)) > width - LABEL:
        return labelled("step", joined([key.strip() for key in keys], width - LABEL), width)
    for key, (_, style, _, _) in zip(keys, parts, strict=True):
        line.append(key[:2], style).append(key[2:])
    return [cut(line, width)]


def fleet(view: FleetView | None, width: int) -> list[Text]:
    """What the size of the fleet follows from."""
    if view is None or view.fixed_s is None:
        return []
    cheapest = "prices not known" if view.cheapest is None else f"{view.cheapest:.1f} nodes cheapest"
    split = f"{short(view.fixed_s)} s + {short(view.generation_node_s)} node-seconds generating"
    words = [split, f"{cheapest}, {view.nodes} wanted"]
    return labelled("fleet", joined(words, width - LABEL), width, style="dim")


def weights(view: RunView, width: int) -> list[Text]:
    """What the newest policy took to reach the nodes."""
    return [] if view.weights is None else labelled("weights", weights_words(view.weights), width, style="dim")


def coming(view: RunView, width: int) -> list[Text]:
    """What nodes fetch or start that are of no use yet."""
    stages = stages_words({node.node: node.stage for node in view.nodes if node.stage is not None})
    return [
        line
        for place, words in enumerate(stages)
        for line in labelled("" if place else "coming", words, width, style="yellow")
    ]
