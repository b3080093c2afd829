"""Summarize a run at any time: whether it learned, what went wrong, what it cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_orch.checkpoint.records import documents, metrics
from grpo_orch.checkpoint.records.documents import RehearsedFault
from grpo_orch.checkpoint.records.metrics import StepTiming, logged, median_timing, step_timings
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.plan.prices import store_place
from grpo_orch.orchestrator.views.formatting import (
    UNKNOWN_TEXT,
    Change,
    change_words,
    changes_of,
    discarded_words,
    duration,
    labelled_grid,
    overlap_words,
    short,
    skipped_of,
    skipped_words,
    stage_words,
    start_words,
    usd,
)
from grpo_orch.orchestrator.views.reader import Reader
from grpo_orch.orchestrator.views.view_model import (
    HealthView,
    WeightsView,
    health_of,
    policy_stage_words,
    timing_words,
    weights_view,
    weights_words,
)
from grpo_orch.policies.costs.store_costs import SAME_REGION, Location, Stored, Tariff, tariff_of, usage_of_run
from grpo_orch.policies.detect.divergence import Health
from grpo_orch.policies.fleet.budget import not_counted
from grpo_orch.policies.ledger.accounting import (
    Fault,
    FaultCost,
    abandoned,
    fault_costs,
    journalled_faults,
    merge_faults,
)
from grpo_orch.policies.ledger.rentals import Rental, bill, rentals
from grpo_orch.policies.model.phases import TERMINAL_RUN
from grpo_orch.policies.model.spec import RunSpec, may_overlap
from grpo_orch.policies.model.timelines import Skipped
from grpo_orch.policies.model.vocabulary import Cause, PolicyVersion, RunPhase
from grpo_orch.policies.serving.gateway_status import VersionSpread

SEEDS_ONLY = "only the sampling seeds"
ENDS = 5  # logged values averaged at either end of the run
REWARD = "reward"
HELD_OUT = "eval_reward"
LOGP_DIFFERENCE = "sampling/sampling_logp_difference/max"


@dataclass(frozen=True, slots=True)
class RollbackReport:
    """One rollback: from where to where, why, what changed, and what was discarded."""

    timeline: int  # the new one
    cause: Cause
    reason: str
    from_version: str  # the newest version of the abandoned timeline
    start: str | None  # the checkpoint it returned to; None: the run's start
    changes: dict[str, Change]  # of `grpo`, by key
    skipped: tuple[Skipped, ...]  # steps whose prompts are skipped
    steps_abandoned: int
    tokens_abandoned: int
    windows_unused: int  # stored for steps that were never logged
    tokens_unused: int  # of these windows
    outcome: str  # its stage, in words

    @property
    def changed_words(self) -> str:
        """Describe the changes."""
        parts = change_words(self.changes), skipped_words(self.skipped)
        return "; ".join(part for part in parts if part) or SEEDS_ONLY

    @property
    def lost_words(self) -> str:
        """Describe what was discarded."""
        return discarded_words(
            self.steps_abandoned, self.tokens_abandoned, self.windows_unused, self.tokens_unused
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The summary, also as JSON. Values that were never logged are None.

    The local cloud uses the rehearsal's prices.
    """

    name: str
    store: str
    phase: RunPhase
    reason: str
    timeline: int
    steps: int  # of the current timeline and its ancestors
    reward_first: float | None  # mean of the first ENDS logged
    reward_last: float | None  # mean of the last ENDS logged
    held_out_first: float | None  # first logged
    held_out_last: float | None  # last logged
    kl_last: float | None
    sampling_logp_difference_max: float | None
    checkpoints: int  # kept in the store now
    wall_s: float
    seconds_lost: float
    tokens_generated: int
    tokens_regenerated: int
    cost_usd: float
    cost_all_on_demand_usd: float
    saved_usd: float  # the difference; never below 0
    usd_per_step: float | None  # None before the first step
    usd_per_million_tokens: float | None  # trained tokens
    not_counted: str
    store_usd: float  # estimated; not part of `cost_usd`
    store_unpriced: str  # the parts without a known price
    faults_survived: int
    faults: tuple[FaultCost, ...]
    restarts: dict[str, int]  # by slot, of its machine or job after a fault
    rollbacks: tuple[RollbackReport, ...]
    steps_abandoned: int  # by all rollbacks
    tokens_abandoned: int
    windows_unused: int
    tokens_unused: int
    health: HealthView  # of the current timeline
    weights: WeightsView | None  # transfer of the policies; for nodes, as far as the last gateway remembers
    step_timing: StepTiming | None  # medians of all steps of the current timeline and its ancestors
    overlap: str | None  # actual or possible gain of overlapping; None: not available


def build_report(reader: Reader, now_s: float) -> Report:
    """Summarize the run as of `now_s`, as `reader` has read it, with the whole journal."""
    store, rows, state = reader.store, reader.path, reader.state
    end_s = _end_s(reader, now_s)
    finished = state.phase is RunPhase.FINISHED
    costs = tuple(fault_costs(reader.rows, run_faults(reader), finished=finished))
    restarts = Counter(fault.target for fault in journalled_faults(reader.history))
    # A controller machine costs money after the run's end, until `down`.
    controllers_usd = sum(rental.usd for rental in reader.controllers(now_s))
    rented, tariff = rentals(reader.history, end_s), _tariff(reader)
    wall_s = max(0.0, end_s - reader.record.created_at_s)
    money = bill(rented, controllers_usd)
    rewards, held_out = logged(rows, REWARD), logged(rows, HELD_OUT)
    rollbacks = rollback_reports(reader)
    trained = sum(row.tokens for row in rows)
    timing = median_timing(timing for _, timing in step_timings(rows))
    return Report(
        name=reader.spec.name,
        store=store.url,
        phase=state.phase,
        reason=state.reason,
        timeline=state.timeline,
        steps=rows[-1].step if rows else 0,
        reward_first=mean(rewards[:ENDS]) if rewards else None,
        reward_last=mean(rewards[-ENDS:]) if rewards else None,
        held_out_first=held_out[0] if held_out else None,
        held_out_last=held_out[-1] if held_out else None,
        kl_last=next(reversed(logged(rows, "kl")), None),
        sampling_logp_difference_max=max(logged(reader.rows, LOGP_DIFFERENCE), default=None),
        checkpoints=len(reader.checkpoints),
        wall_s=wall_s,
        seconds_lost=sum(cost.seconds_lost for cost in costs),
        tokens_generated=sum(row.tokens for row in reader.rows),
        tokens_regenerated=sum(row.tokens_discarded for row in reader.rows),
        cost_usd=money.cost_usd,
        cost_all_on_demand_usd=money.cost_all_on_demand_usd,
        saved_usd=max(0.0, money.cost_all_on_demand_usd - money.cost_usd),
        usd_per_step=money.cost_usd / rows[-1].step if rows and rows[-1].step else None,
        usd_per_million_tokens=money.cost_usd / trained * 1e6 if trained else None,
        not_counted=not_counted(reader.spec),
        store_usd=_store_usd(reader, rented, tariff, wall_s),
        store_unpriced=_unpriced(tariff),
        faults_survived=sum(cost.survived for cost in costs),
        faults=costs,
        restarts={slot: restarts[slot] for slot in sorted(state.slots)},
        rollbacks=rollbacks,
        steps_abandoned=sum(rollback.steps_abandoned for rollback in rollbacks),
        tokens_abandoned=sum(rollback.tokens_abandoned for rollback in rollbacks),
        windows_unused=sum(rollback.windows_unused for rollback in rollbacks),
        tokens_unused=sum(rollback.tokens_unused for rollback in rollbacks),
        health=health_of(state),
        weights=weights_view(reader.rows, _versions(store)),
        step_timing=timing,
        overlap=_overlap(timing, reader.spec),
    )


def run_faults(reader: Reader) -> list[Fault]:
    """Return all faults of the run, rehearsed or not, in order. `reader` has read the whole journal."""
    return merge_faults(map(_rehearsed_fault, reader.faults), journalled_faults(reader.history))


def render(report: Report) -> RenderableType:
    """Draw the report for a terminal."""
    parts: list[RenderableType] = [Text(f"{report.name}: {report.phase}", style="bold"), _figures(report)]
    if report.faults:
        parts.append(_faults(report))
    for rollback in report.rollbacks:
        parts += [Text(""), _rollback_table(rollback)]
    return Group(*parts)


def _end_s(reader: Reader, now_s: float) -> float:
    """Return the time of the last journal entry of a run that has ended, else `now_s`."""
    if reader.state.phase in TERMINAL_RUN and reader.last is not None:
        return reader.last.time_s
    return now_s


def _overlap(timing: StepTiming | None, spec: RunSpec) -> str | None:
    if timing is None or not may_overlap(spec):
        return None
    return overlap_words(timing.step_s, timing.sequential_s, timing.overlapped_s, spec.rollout.max_staleness)


def _tariff(reader: Reader) -> Tariff:
    """Return the prices of the run's store, as seen from its machines."""
    if reader.spec.cloud != "sky":
        return tariff_of(SAME_REGION, SAME_REGION)
    return tariff_of(store_place(reader.store), _machines_place(reader))


def _machines_place(reader: Reader) -> Location:
    """Return the location of the run's machines; unknown before the first has a pool."""
    pool = next((node.pool for node in reader.newest_node.values() if node.pool is not None), None)
    return Location("") if pool is None else Location(pool.cloud, pool.region)


def _store_usd(reader: Reader, rented: Sequence[Rental], tariff: Tariff, wall_s: float) -> float:
    """Estimate the cost of the store's requests and traffic over the whole run."""
    spec, rows = reader.spec, reader.rows
    published = next((row.values for row in reversed(rows) if row.values.get(metrics.PUBLISHED)), None)
    policy_bytes = 0.0
    if published is not None:
        policy_bytes = published[metrics.WEIGHTS_BYTES] / published[metrics.PUBLISHED]
    stored = Stored(
        steps=len(rows) * int(spec.grpo.get("logging_steps", 1)),
        tokens=sum(row.tokens for row in rows),
        sent_bytes=sum(row.values.get(metrics.PUBLISHED_BYTES, 0.0) for row in rows),
        policy_bytes=policy_bytes,
    )
    return tariff.usd(usage_of_run(stored, [(rental.role, rental.hours) for rental in rented], wall_s, spec))


def _unpriced(tariff: Tariff) -> str:
    requests = "its requests (price not known)" if tariff.put_usd is None else ""
    traffic = f"its traffic ({tariff.reason})" if tariff.reason else ""
    return ", ".join(part for part in (requests, traffic) if part)


def _rehearsed_fault(fault: RehearsedFault) -> Fault:
    """Convert a rehearsed fault for the accounting."""
    name = f"{fault.fault.replace('_', ' ')} {fault.target}"
    return Fault(name, fault.target, fault.time_s, fault.time_s, fault.at_step)


def rollback_reports(reader: Reader) -> tuple[RollbackReport, ...]:
    """Describe the run's rollbacks, in order."""
    state, rows, found = reader.state, reader.rows, []
    befores = [None, *(rollback.fork for rollback in state.rollbacks)]
    for rollback, before, lost in zip(state.rollbacks, befores, abandoned(rows, state.rollbacks), strict=False):
        fork = rollback.fork
        left = PolicyVersion(0 if before is None else before.timeline, lost.last_step)
        unused = metrics.unused_before(rows, fork.timeline)
        is_current = rollback.passed or rollback is state.rollbacks[-1]
        found.append(
            RollbackReport(
                timeline=fork.timeline,
                cause=rollback.cause,
                reason=fork.reason,
                from_version=str(left),
                start=fork.start,
                changes=changes_of(fork, before, reader.spec.grpo),
                skipped=skipped_of(fork, before),
                steps_abandoned=lost.steps,
                tokens_abandoned=lost.tokens,
                windows_unused=unused[0],
                tokens_unused=unused[1],
                outcome=stage_words(rollback) if is_current else "was replaced by the next rollback",
            )
        )
    return tuple(found)


def _versions(store: Store) -> list[VersionSpread]:
    status = documents.read_members(store)
    return [] if status is None else status.versions


def _figures(report: Report) -> RenderableType:
    table = labelled_grid()
    restarts = ", ".join(f"{slot} {count}" for slot, count in report.restarts.items() if count) or "none"
    if report.phase in TERMINAL_RUN:
        table.add_row("reason", Text(report.reason))
    table.add_row("steps", f"{report.steps} in {duration(report.wall_s)}, {report.checkpoints} checkpoint(s) kept")
    table.add_row("reward", f"{short(report.reward_first)} → {short(report.reward_last)}")
    if report.held_out_first is not None:
        table.add_row("held-out score", f"{short(report.held_out_first)} → {short(report.held_out_last)}")
    table.add_row("last KL", short(report.kl_last))
    table.add_row("faults survived", f"{report.faults_survived} of {len(report.faults)}")
    table.add_row("restarts", restarts)
    table.add_row("time lost", duration(report.seconds_lost))
    table.add_row("tokens", f"{report.tokens_generated:,} generated, {report.tokens_regenerated:,} regenerated")
    if report.rollbacks:
        lost = discarded_words(
            report.steps_abandoned, report.tokens_abandoned, report.windows_unused, report.tokens_unused
        )
        table.add_row("rollbacks", f"{len(report.rollbacks)}; {lost}")
    table.add_row("cost", f"{usd(report.cost_usd)}; all on demand {usd(report.cost_all_on_demand_usd)}")
    if report.cost_usd > 0 and report.usd_per_step is not None and report.usd_per_million_tokens is not None:
        each = f"{usd(report.usd_per_step)} a step, {usd(report.usd_per_million_tokens)} a million trained tokens"
        table.add_row("", f"{each}; {usd(report.saved_usd)} saved; not counted: {report.not_counted}")
    if report.store_usd or report.store_unpriced:
        without = f", not counting {report.store_unpriced}" if report.store_unpriced else ""
        table.add_row("store", f"about {usd(report.store_usd)} more{without}")
    drift = f"{short(report.sampling_logp_difference_max)}, the largest log-probability difference"
    table.add_row("sampling drift", drift)
    if report.weights is not None:
        table.add_row("weights", f"{report.weights.policies} policies of {weights_words(report.weights)}")
        table.add_row("", policy_stage_words(report.weights))
    if report.step_timing is not None:
        table.add_row("a step", ", ".join(timing_words(report.step_timing)))
    if report.overlap is not None:
        table.add_row("overlap", report.overlap)
    if report.health.health is not Health.HEALTHY:
        label = "diverged" if report.health.health is Health.TRIPPED else "possible divergence"
        evidence = "; ".join(report.health.evidence)
        table.add_row(label, Text(f"since step {report.health.onset_step}{': ' if evidence else ''}{evidence}"))
    return table


def _rollback_table(rollback: RollbackReport) -> RenderableType:
    table = labelled_grid()
    ends = f"from {rollback.from_version} to {start_words(rollback.start)}"
    table.add_row(f"timeline {rollback.timeline}", f"{ends}; {rollback.lost_words}")
    table.add_row("reason", Text(rollback.reason))
    table.add_row("changed", rollback.changed_words)
    table.add_row("now", rollback.outcome)
    return table


def _faults(report: Report) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("\nfault")
    for title in ("\nat step", "seconds\nlost", "tokens\nregenerated"):
        table.add_column(title, justify="right")
    table.add_column("\nsurvived")
    for cost in report.faults:
        survived = "yes" if cost.survived else UNKNOWN_TEXT
        lost = f"{cost.seconds_lost:.1f}"
        table.add_row(cost.name, str(cost.at_step), lost, f"{cost.tokens_regenerated:,}", survived)
    return table
