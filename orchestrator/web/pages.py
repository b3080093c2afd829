"""The pages of the run as a whole, its machines now, its checkpoints, rollbacks, money, diary and samples."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict
from itertools import groupby
from typing import Any

import numpy as np

from checkpoint.records.metrics import unused_before
from orchestrator.samples import (
    Found,
    Link,
    NoSamples,
    Order,
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
from orchestrator.views.events import event_json
from orchestrator.views.measured import FAILED, NodeState
from orchestrator.views.model import to_json
from orchestrator.views.words import (
    change_words,
    changes_of,
    kept_as,
    skipped_of,
    skipped_words,
    stage_words,
    start_words,
    thrown_away_words,
)
from orchestrator.web.page import Asked, Page, Refused
from orchestrator.web.watch import Look
from policies.ledger.accounting import abandoned
from policies.ledger.rentals import spent_over_time
from policies.model.events import BudgetSet, Diverged
from policies.model.vocabulary import machine_of
from policies.serving.gateway_status import MemberStatus

# The first page: how the run goes, on one axis, and what happened last.


def _run(look: Look, _: Asked) -> dict[str, Any]:
    return {"run": to_json(look.view)}


RUN = Page("/", _run, "run.html", "Run")


# The stored checkpoints, and why each of them stays.


def _checkpoints(look: Look, _: Asked) -> dict[str, Any]:
    reasons = kept_as(look.checkpoints, look.record.spec, look.state.forks, look.trainer)
    listed = [
        {
            "version": one.version,
            "created_at_s": one.created_at_s,
            "size_bytes": one.size_bytes,
            "pinned": one.pinned,
            "kept_as": list(reasons[one.at]),
        }
        for one in reversed(look.checkpoints)
    ]
    return {"checkpoints": listed}


CHECKPOINTS = Page("/checkpoints", _checkpoints, "checkpoints.html", "Checkpoints")


# Each rollback with its evidence: what was seen, where it went back to, what it changed, how it went.


def _rollbacks(look: Look, _: Asked) -> dict[str, Any]:
    return {"rollbacks": look.once("rollbacks", lambda: _all_rollbacks(look))}


def _all_rollbacks(look: Look) -> list[dict[str, Any]]:
    state = look.state
    seen = [event for _, _, events in look.history for event in events if isinstance(event, Diverged)]
    befores = [None, *(one.fork for one in state.rollbacks)]
    found = []
    for one, before, lost in zip(state.rollbacks, befores, abandoned(look.rows, state.rollbacks), strict=False):
        trips = [event for event in seen if event.timeline == (0 if before is None else before.timeline)]
        windows, tokens = unused_before(look.rows, one.fork.timeline)
        changed = [
            change_words(changes_of(one.fork, before, look.record.spec.grpo)),
            skipped_words(skipped_of(one.fork, before)),
        ]
        found.append(
            {
                "timeline": one.fork.timeline,
                "cause": one.cause,
                "reason": one.fork.reason,
                "from_step": one.from_step,
                "start": start_words(one.fork.start),
                "changed": "; ".join(part for part in changed if part) or "the sampling seeds alone",
                "evidence": list(trips[-1].evidence) if trips else [],
                "onset_step": trips[-1].onset_step if trips else None,
                "steps_abandoned": lost.steps,
                "tokens_abandoned": lost.tokens,
                "windows_unused": windows,
                "tokens_unused": tokens,
                "thrown_away": thrown_away_words(lost.steps, lost.tokens, windows, tokens),
                "outcome": stage_words(one)
                if one.passed or one is state.rollbacks[-1]
                else "was left by the next",
            }
        )
    return found[::-1]


ROLLBACKS = Page("/rollbacks", _rollbacks, "rollbacks.html", "Rollbacks")


# What the run costs: spent, by what it was for and over time; what it would have been on demand, a step, and at
# the end as it goes now.
MONEY_POINTS = 400


def _money(look: Look, _: Asked) -> dict[str, Any]:
    money = look.view.money
    return {
        "money": asdict(money),
        "over_time": look.once("dollars", lambda: _over_time(look)),
    }


def _over_time(look: Look) -> dict[str, Any]:
    """By what it was for, columns of at most MONEY_POINTS; the budgets from when on; the end as it goes now."""
    now_s, money = look.view.now_s, look.view.money
    spent = [asdict(at) for at in spent_over_time(look.history, now_s, look.controllers)]
    times_s = np.array([at.pop("time_s") for at in spent])
    drawn_s = times_s if len(spent) <= MONEY_POINTS else np.linspace(times_s[0], times_s[-1], MONEY_POINTS)
    columns = {name: np.array([at[name] for at in spent]) for name in (spent[0] if spent else ())}
    eta_s, forecast = look.view.eta_s, money.forecast_usd
    return {
        "x": drawn_s.tolist(),
        "usd": {
            name.removesuffix("_usd").replace("_", " "): np.interp(drawn_s, times_s, column).round(4).tolist()
            for name, column in columns.items()
        },
        "budget": _budgets(look),
        "forecast": None if forecast is None or eta_s is None else {"time": now_s + eta_s, "usd": forecast},
    }


def _budgets(look: Look) -> list[tuple[float, float]]:
    """From when on each was, seconds since the epoch, and USD."""
    first = look.record.spec.budget.usd
    since_s = look.history[0][1] if look.history else look.view.now_s
    found = [] if first is None else [(since_s, first)]
    found += [
        (at_s, event.usd) for _, at_s, events in look.history for event in events if isinstance(event, BudgetSet)
    ]
    return found


MONEY = Page("/money", _money, "money.html", "Money")


# The journal as a diary: the newest first, a page at a time, by kind and by word.
DIARY_LINES = 200
FAR = 10**9


def _diary(look: Look, asked: Asked) -> dict[str, Any]:
    kind, word = asked.text("kind"), asked.text("word")
    first = asked.whole("first", 0, 0, FAR)
    found = [
        line
        for line in reversed(look.diary)
        if (not kind or line.type == kind) and word.casefold() in line.text.casefold()
    ]
    return {
        "lines": [event_json(line) for line in found[first : first + DIARY_LINES]],
        "first": first,
        "total": len(found),
        "kinds": look.once("kinds", lambda: sorted({line.type for line in look.diary})),
        "kind": kind,
        "word": word,
        "on_a_page": DIARY_LINES,
    }


DIARY = Page("/diary", _diary, "diary.html", "Diary")


# The machines now: what each does and holds, its speed and price; the lost come last.

NODES_ON_A_PAGE = 100
NODES_MOST = 10**6


def _nodes_page(look: Look, asked: Asked) -> dict[str, Any]:
    first = asked.whole("first", 0, 0, NODES_MOST)
    told = look.once("nodes", lambda: _nodes(look))
    counts = Counter(node["state"] for node in told)
    return {
        "nodes": told[first : first + NODES_ON_A_PAGE],
        "first": first,
        "total": len(told),
        "counts": dict(counts.most_common()),
        "on_a_page": NODES_ON_A_PAGE,
    }


def states_of(look: Look) -> dict[str, str]:
    """Of each machine now."""
    return {node.node: str(node.state) for node in look.view.nodes}


def _members(look: Look) -> defaultdict[str, list[MemberStatus]]:
    members = defaultdict[str, list[MemberStatus]](list)
    for one in look.gateway.members if look.gateway else []:
        members[machine_of(one.node)].append(one)
    return members


def _nodes(look: Look) -> list[dict[str, Any]]:
    members = _members(look)
    told = []
    for node in look.view.nodes:
        own = members[node.node]
        told.append(
            {
                "node": node.node,
                "role": node.role,
                "state": node.state,
                "since_s": node.since_s,
                "reason": node.unfit or node.reason,
                "market": node.market.replace("_", " "),
                "pool": node.pool,
                "policy": node.policy,
                "tokens_per_s": node.tokens_per_s,
                "running": sum(one.requests_running for one in own) if own else None,
                "queue": sum(one.engine.waiting for one in own if one.engine) if own else None,
                "price_usd_per_h": node.price_usd_per_h,
                "restarts": node.restarts,
            }
        )
    return sorted(told, key=lambda one: (one["role"] != "trainer", one["state"] in (*FAILED, NodeState.GONE)))


NODES = Page("/nodes", _nodes_page, "nodes.html", "Nodes")


# What the model writes in a step: groups side by side, by words, reward, node and version, the worst and the
# best. Drawn once: a text that somebody reads does not change under their eyes.

SAMPLES_ON_A_PAGE = 32  # completions
_ONLY = {"": (None, None), "cut": (True, None), "whole": (False, None), "handed_over": (None, True)}


def _samples(look: Look, asked: Asked) -> dict[str, Any]:
    order = Order(asked.choice("order", tuple(Order)))
    only = asked.choice("only", tuple(_ONLY))
    first = asked.whole("first", 0, 0, FAR)
    words = {name: asked.text(name) for name in ("step", "search", "low", "high", "node", "policy")}
    wanted = Wanted(
        search=words["search"],
        reward_min=_number(asked, "low"),
        reward_max=_number(asked, "high"),
        node=words["node"],
        policy=words["policy"],
        cut=_ONLY[only][0],
        handed_over=_ONLY[only][1],
    )
    asked_for = {**words, "order": str(order), "only": only}
    steps = stored_steps(look.store)
    if not steps:
        return {"why_none": why_none(look.store), "asked_for": asked_for, "groups": []}
    try:
        step = find_step(steps, words["step"])
    except NoSamples as error:
        raise Refused(404, str(error)) from None
    chosen, told = choose(step, groups_of(look.store, step), wanted, order, SAMPLES_ON_A_PAGE, first)
    place = steps.index(step)
    return {
        **summary_plain(step, told),
        "why_none": "",
        "before": str(steps[place - 1]) if place else None,
        "after": str(steps[place + 1]) if place + 1 < len(steps) else None,
        "steps": len(steps),
        "first": first,
        "on_a_page": SAMPLES_ON_A_PAGE,
        "asked_for": {**asked_for, "step": str(step)},
        "groups": [
            {
                "group": number,
                "prompt": messages_plain(rows[0].group.prompt),
                "completions": [completion_plain(one) for one in rows],
            }
            for number, found in groupby(chosen, key=lambda one: one.link.group)
            for rows in [list(found)]
        ],
    }


def _number(asked: Asked, name: str) -> float | None:
    return asked.number(name, 0.0, -1e9, 1e9) if asked.text(name) else None


SAMPLES = Page("/samples", _samples, "samples.html", "Samples")


# One completion, whole, under a name that lasts as long as its step's samples are kept.


def _sample(look: Look, asked: Asked) -> dict[str, Any]:
    try:
        link = Link.parse("/".join(asked.text(name) for name in ("step", "group", "index")))
        step = find_step(stored_steps(look.store), link.step)
    except NoSamples as error:
        raise Refused(404, str(error)) from None
    for number, head, group in groups_of(look.store, step):
        if number == link.group and link.index < len(group.samples):
            one = Found(link, head, group, group.samples[link.index])
            return {
                "step": str(step),
                "prompt": messages_plain(group.prompt),
                "completion": completion_plain(one),
                "beside": len(group.samples),
            }
    raise Refused(404, f"step {step} has no completion {link.group}/{link.index}")


SAMPLE = Page("/samples/{step}/{group}/{index}", _sample, "sample.html")
