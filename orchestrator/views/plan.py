"""Draw a run's plan for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_orch.orchestrator.plan.model import (
    CheckpointPlan,
    KindPlan,
    MachinePlan,
    MoneyPlan,
    NodesPlan,
    Plan,
    StepPlan,
    SyncPlan,
)
from grpo_orch.orchestrator.views.formatting import (
    UNKNOWN_TEXT,
    duration,
    labelled_grid,
    overlap_words,
    seconds_words,
    short,
    usd,
)
from grpo_orch.policies.model.vocabulary import Market
from grpo_orch.policies.sizing.memory import GIB

GB = 10**9
KINDS_SHOWN = 6
NODES_SHOWN = 3


def render(plan: Plan) -> RenderableType:
    """Draw the whole plan."""
    parts: list[RenderableType] = [Text(_title(plan), style="bold")]
    if plan.trainer.memory or (plan.rollout is not None and plan.rollout.memory):
        parts += [Text(""), _memory(plan)]
    if (facts := _facts(plan)).row_count:
        parts += [Text(""), facts]
    if _is_priced(plan):
        parts += [Text(""), _money(plan)]
    if plan.kinds:
        parts += [Text(""), _kinds(plan)]
    return Group(*parts, *_remarks(plan))


def render_short(plan: Plan) -> RenderableType:
    """Draw the summary shown before a run starts: whether it fits, step time, dollars, and warnings."""
    table = labelled_grid()
    for machine in _machines(plan):
        if machine.memory_bytes is not None and machine.gpu:
            table.add_row(f"{machine.role} memory", _fit_words(machine))
    for row in _step_rows(plan):
        table.add_row(*row)
    if (words := _cost_words(plan)) is not None:
        table.add_row("cost", words)
    warnings = [Text(f"warning: {warning.key}: {warning.message}", "yellow") for warning in plan.warnings]
    hint = Text("`grpo-orch plan` shows the whole plan and the source of each number", style="dim")
    return Group(table, *warnings, hint)


def _title(plan: Plan) -> str:
    model = plan.model
    size = f", {_count(model.params)} parameters" if model.params else ""
    return f"{plan.name}: {model.name}{size}, {model.method}"


def _machines(plan: Plan) -> list[MachinePlan]:
    return [plan.trainer] if plan.rollout is None else [plan.trainer, plan.rollout]


def _memory(plan: Plan) -> Table:
    machines = _machines(plan)
    table = _table("GiB of each GPU", *(f"{machine.role}" for machine in machines))
    table.add_row("", *(Text(_kind_words(machine), style="dim") for machine in machines))
    names = dict.fromkeys(name for machine in machines for name in machine.memory)
    for name in names:
        table.add_row(name, *(_gib(machine.memory.get(name)) for machine in machines))
    table.add_row("total", *(Text(_gib(machine.memory_bytes), style="bold") for machine in machines))
    table.add_row("", *(_fit(machine) for machine in machines))
    return table


def _kind_words(machine: MachinePlan) -> str:
    if not machine.gpu:
        return "no GPU named"
    size = f", {machine.gpu_bytes / GIB:.0f}" if machine.gpu_bytes else ""
    named = "" if machine.gpu_is_named else "e.g. "
    return f"{named}{max(1, machine.gpus)} x {machine.gpu}{size}"


def _fit(machine: MachinePlan) -> Text:
    if machine.fits is None:
        return Text(UNKNOWN_TEXT)
    return Text("fits", style="green") if machine.fits else Text("does not fit", style="bold red")


def _fit_words(machine: MachinePlan) -> str:
    verdict = {True: "fits", False: "DOES NOT FIT", None: "unknown whether it fits"}[machine.fits]
    return f"{_gib(machine.memory_bytes)} GiB on each GPU ({_kind_words(machine)} GiB): {verdict}"


def _facts(plan: Plan) -> Table:
    table = labelled_grid()
    for row in _step_rows(plan):
        table.add_row(*row)
    if plan.sync is not None:
        table.add_row("new weights", _sync_words(plan.sync))
    if plan.nodes is not None and plan.rollout is not None and plan.rollout.max_nodes > 1:
        table.add_row("nodes", _node_words(plan.nodes, plan.rollout))
    if plan.rollout is not None and plan.rollout.cache_tokens is not None:
        cache = f"{plan.rollout.cache_tokens:,} tokens an engine"
        table.add_row("KV cache", f"{cache}: {short(plan.rollout.sequences)} sequences of the maximum length")
    if plan.trainer.host:
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in plan.trainer.host.items())
        table.add_row("RAM", f"trainer machine, GiB: {parts}")
    if plan.lost is not None:
        step = f"{duration(plan.lost.step_s)}{_dollars(plan.lost.step_usd)}"
        most = f"{duration(plan.lost.max_s)}{_dollars(plan.lost.max_usd)}"
        table.add_row(
            "lost step", f"costs {step}; up to {plan.lost.max_steps} steps, {most} (completions are kept)"
        )
    if plan.checkpoints is not None:
        table.add_row("checkpoint", stored_words(plan.checkpoints))
    if plan.hours is not None:
        table.add_row("to the end", f"{plan.steps:,} steps, {duration(3600 * plan.hours)}")
    return table


def _step_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.step is not None:
        yield "step", f"{duration(plan.step.step_s)}, estimated: {_step_words(plan.step)}"
        sequential_s, overlapped_s = plan.step.sequential_s, plan.step.overlapped_s
        if sequential_s is not None and overlapped_s is not None:
            words = overlap_words(plan.step.step_s, sequential_s, overlapped_s, plan.step.max_staleness)
            yield "overlap", words


def _step_words(step: StepPlan) -> str:
    parts = {"generate": step.generate_s, "train": step.train_s, "sync": step.sync_s}
    times = [f"{name} {seconds_words(value)}" for name, value in parts.items() if value]
    size = f"{short(step.completions)} completions of {short(step.completion_tokens)} tokens"
    return ", ".join([*times, size])


def _node_words(nodes: NodesPlan, rollout: MachinePlan) -> str:
    exact = (
        ""
        if nodes.exact is None
        else f" (ideal {short(nodes.exact)}, of {rollout.min_nodes} to {rollout.max_nodes})"
    )
    shown = nodes.steps[:NODES_SHOWN]
    steps = ", ".join(f"{count}: {duration(step_s)}{_dollars(cost)}" for count, step_s, cost in shown)
    best = "prices are not known" if nodes.exact is None else f"best: {nodes.best}"
    return f"{best}{exact}; a step with {steps}"


def _dollars(cost: float | None) -> str:
    return "" if cost is None else f" {usd(cost)}"


def _sync_words(sync: SyncPlan) -> str:
    """Return `delta, 2.2 GB (1.1 % of the weights), estimated: 3.8 s at 10 Gb/s, 1.9 s at 25 Gb/s, ...`."""
    times = ", ".join(f"{seconds_words(sync.seconds[link])} at {link} Gb/s" for link in sorted(sync.seconds))
    size = f"{short(sync.size_bytes / GB)} GB ({_percent(sync.share)} of the weights)"
    return f"{sync.form}, {size}, estimated: {times}"


def _is_priced(plan: Plan) -> bool:
    return any(option.cost is not None and option.cost.usd_per_h > 0 for option in plan.money)


def _money(plan: Plan) -> Table:
    nodes = f", {plan.bought} rollout" if plan.rollout is not None else ""
    table = _table(f"USD, 1 trainer{nodes}", "an hour", "a day", "to the end", "")
    for option in plan.money:
        table.add_row(option.name, *_cost_cells(option), Text("this run", style="green") if option.used else "")
    return table


def _cost_cells(option: MoneyPlan) -> tuple[str, str, str]:
    if option.cost is None:
        return UNKNOWN_TEXT, UNKNOWN_TEXT, UNKNOWN_TEXT
    end = UNKNOWN_TEXT if option.cost.to_end_usd is None else short(option.cost.to_end_usd)
    return f"{option.cost.usd_per_h:,.2f}", f"{option.cost.usd_per_day:,.2f}", end


def _cost_words(plan: Plan) -> str | None:
    """Return `USD 6.34 an hour, 152.16 a day, about 95.10 to the end (15:00 h); all on demand 7.92 an hour`."""
    used = next((option.cost for option in plan.money if option.used), None)
    if used is None or not _is_priced(plan):
        return None
    end = "" if used.to_end_usd is None else f", about {short(used.to_end_usd)} to the end"
    last = "" if plan.hours is None or not end else f" ({duration(3600 * plan.hours)})"
    nodes = _bought_words(plan.bought, plan.rollout)
    on_demand = (option.cost for option in plan.money if option.name == "all on demand" and not option.used)
    other = next(on_demand, None)
    comparison = "" if other is None else f"; all on demand {other.usd_per_h:,.2f} an hour"
    hourly = f"USD {used.usd_per_h:,.2f} an hour, {used.usd_per_day:,.2f} a day{end}{last}{nodes}{comparison}"
    return f"{hourly}{_unit_cost_words(plan)}"


def _unit_cost_words(plan: Plan) -> str:
    """Return `; 0.24 a step, 1.10 a million trained tokens; plus disks 0.07 an hour`."""
    words = "" if plan.usd_per_step is None else f"; {short(plan.usd_per_step)} a step"
    if plan.usd_per_million_tokens is not None:
        words += f", {short(plan.usd_per_million_tokens)} a million trained tokens"
    return f"{words}; plus disks {plan.disks_usd_per_h:,.2f} an hour" if plan.disks_usd_per_h else words


def _bought_words(bought: int, rollout: MachinePlan | None) -> str:
    if rollout is None or bought == rollout.max_nodes:
        return ""
    return f", with {bought} of {rollout.max_nodes} rollout nodes, the cheapest fleet size"


def _kinds(plan: Plan) -> Table:
    table = _table("GPUs that fit", "GiB", *(machine.role.value for machine in _machines(plan)))
    for kind in _worth_showing(plan.kinds):
        cells = [_kind_cell(kind.trainer_gpus, kind, plan.trainer)]
        if plan.rollout is not None:
            cells.append(_kind_cell(kind.rollout_gpus, kind, plan.rollout))
        table.add_row(kind.gpu, f"{kind.memory_bytes / GIB:.0f}", *cells)
    if len(plan.kinds) > KINDS_SHOWN:
        table.add_row(Text(f"and {len(plan.kinds) - KINDS_SHOWN} more (-o json)", style="dim"))
    return table


def _worth_showing(kinds: Iterable[KindPlan]) -> list[KindPlan]:
    """Choose KINDS_SHOWN kinds: with prices first, then those for the trainer. Keeps their order."""
    ordered = sorted(
        kinds, key=lambda kind: (not (kind.trainer_prices or kind.rollout_prices), kind.trainer_gpus is None)
    )
    return [kind for kind in kinds if kind in ordered[:KINDS_SHOWN]]


def _kind_cell(count: int | None, kind: KindPlan, machine: MachinePlan) -> Text:
    if count is None:
        return Text("too small", style="dim")
    prices = kind.trainer_prices if machine.role == "trainer" else kind.rollout_prices
    if not prices:
        return Text(f"{count} x")
    best, spot = prices[0], machine.market is Market.SPOT
    price = best.spot_usd_per_h if spot else best.on_demand_usd_per_h
    shown = UNKNOWN_TEXT if price is None else f"{price:.2f}"
    return Text(f"{count} x {shown} {best.cloud}{' spot' * spot}")


def _remarks(plan: Plan) -> Iterator[RenderableType]:
    lines = [Text(f"warning: {warning.key}: {warning.message}", "yellow") for warning in plan.warnings]
    lines += [Text(f"not known: {value}") for value in plan.unknown]
    lines += [Text(note, style="dim") for note in plan.notes]
    if lines:
        yield Text("")
        yield from lines


def _count(params: int) -> str:
    """Return `32.8 billion` or `93 thousand`."""
    for size, name in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if params >= size:
            return f"{short(params / size)} {name}"
    return str(params)


def _percent(share: float) -> str:
    """Format a share with two significant figures, `0.56 %`, or `100 %`."""
    return f"{100 * share:.2g} %" if share < 0.995 else "100 %"


def _gib(size_bytes: int | None) -> str:
    """Format GiB with one decimal, below 1 with two."""
    if not size_bytes:
        return ""
    size = size_bytes / GIB
    return f"{size:.1f}" if size >= 1 else f"{size:.2f}"


def _table(first: str, *titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, no_wrap=True)
    for title in titles:
        table.add_column(title, no_wrap=True, justify="right" if title else "left")
    return table


def stored_words(plan: CheckpointPlan) -> str:
    """Return `6.44 GB every 50 steps (1:12 h), stored in 1:04 min at 100 MB/s, 6 s at 1,000 MB/s; ...`."""
    every = "" if plan.every_s is None else f" ({duration(plan.every_s)})"
    times = ", ".join(f"{duration(seconds)} at {speed:,} MB/s" for speed, seconds in plan.stored_s.items())
    words = f"{short(plan.size_bytes / GB)} GB every {plan.save_steps} steps{every}, stored in {times}"
    return f"{words}; {_kept_words(plan)}" if plan.kept_bytes is not None else words


def _kept_words(plan: CheckpointPlan) -> str:
    base = " and the base model" if plan.base_bytes else ""
    kept = f"at most {plan.max_count}{base} are kept, {short((plan.kept_bytes or 0) / GB)} GB"
    if plan.kept_usd_per_month is None:
        return f"{kept}; the store's price is not known"
    if not plan.kept_usd_per_month:
        return kept
    return f"{kept}, {usd(plan.kept_usd_per_month)} a month"
