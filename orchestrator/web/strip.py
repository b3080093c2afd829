"""The figures at the head of every page: how the run is now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote

from checkpoint.records.metrics import Row
from orchestrator.views.model import RunView, deadline_words, is_late
from orchestrator.views.report import HELD_OUT
from orchestrator.views.words import duration, going_on, short, usd
from orchestrator.web.watch import Look
from policies.detect.divergence import Health
from policies.model.phases import TERMINAL_RUN
from policies.model.vocabulary import Market, NodePhase, Role, RollbackStage

SET_ASIDE_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure, what it is, and what stands below it. `tone` is good, warn, bad or nothing."""

    label: str
    value: str
    below: str = ""
    tone: str = ""


def strip(look: Look) -> list[Figure]:
    """The figures, in their order."""
    return look.once("strip", lambda: _figures(look))


def troubles(view: RunView) -> list[str]:
    """What is off and does not end the run, a line each."""
    told = []
    for one in view.not_bought:
        wait_s = one.tried_again_s - view.now_s
        when = f"in {duration(wait_s)}" if wait_s > 0 else "any time now"
        told.append(f"No machines are bought, {one.kind}; one is tried {when}: {one.reason}")
    if view.store_slow:
        told.append("The store is slow: the newest checkpoint was put off, those before it are still on their way")
    told += [f"{one.key} cannot be read and is left out: {one.why}" for one in view.set_aside[-SET_ASIDE_SHOWN:]]
    return told


def deadline_line(view: RunView) -> Figure | None:
    """When the run is to be done, where it is on the way there, and what that costs as it goes now."""
    words = deadline_words(view)
    if not words:
        return None
    forecast = view.money.forecast_usd
    costs = [] if forecast is None else [f"{usd(forecast)} at the end"]
    return Figure("deadline", words[0], " · ".join([*words[1:], *costs]), "warn" if is_late(view) else "")


def headline(view: RunView) -> str:
    """What matters most right now, in a few words."""
    if view.phase in TERMINAL_RUN:
        hint = going_on(view.phase, view.reason, view.store)
        return f"{view.reason}; {hint}" if hint else view.reason
    if not view.daemon.alive:
        return f"nobody steers it: grpo-orch resume {quote(view.store)}"
    if view.rollback is not None and view.rollback.stage is not RollbackStage.PROBATION:
        return f"timeline {view.rollback.timeline} {view.rollback.text}"
    if view.health.health is not Health.HEALTHY:
        word = "diverged" if view.health.health is Health.TRIPPED else "watched"
        return f"{word} since step {view.health.onset_step}"
    if view.parked_s is not None:
        return f"for {duration(view.parked_s)}: {view.reason}"
    return f"the trainer is {view.activity}" if view.activity else view.reason


def _figures(look: Look) -> list[Figure]:
    view, money = look.view, look.view.money
    of = f"of {view.max_steps:,}" if view.max_steps else ""
    above = view.kl is not None and view.kl_limit is not None and view.kl > view.kl_limit
    limit = f"limit {short(view.kl_limit)}" if view.kl_limit is not None else "no limit"
    forecast = f"{usd(money.forecast_usd)} at the end" if money.forecast_usd is not None else "so far"
    waiting = f"{view.requests_waiting} waiting" if view.requests_waiting else ""
    return [
        Figure("step", f"{view.step:,}", of),
        Figure("reward", short(view.reward), _held_out(look.path)),
        Figure("KL", short(view.kl), limit, "bad" if above else ""),
        Figure("seconds a step", short(view.step_s), f"{duration(view.eta_s)} to go" if view.eta_s else ""),
        Figure("tokens a second", short(view.tokens_per_s), waiting),
        _rollouts(view),
        Figure("spent", usd(money.spent_usd), forecast),
        Figure("rate", usd(money.usd_per_h), "an hour"),
    ]


def _rollouts(view: RunView) -> Figure:
    """How many serve, of how many there are to be: places that a smaller fleet has left are no part of it."""
    serving = [one for one in view.nodes if one.role is Role.ROLLOUT and one.phase is NodePhase.SERVING]
    on_demand = sum(one.market is Market.ON_DEMAND for one in serving)
    if view.fleet is None:
        below = "none in this run"
    elif view.phase in TERMINAL_RUN:
        below = ""
    else:
        below = f"of {view.fleet.nodes}, {on_demand} on demand" if on_demand else f"of {view.fleet.nodes} wanted"
    return Figure("rollout nodes", f"{len(serving)}", below)


def _held_out(rows: Sequence[Row]) -> str:
    found = next((row.values[HELD_OUT] for row in reversed(rows) if HELD_OUT in row.values), None)
    return f"held out {short(found)}" if found is not None else ""
