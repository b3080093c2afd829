"""The pages: run, nodes, money, samples, checkpoints, rollbacks and events."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from itertools import groupby
from typing import Any

import numpy as np

from grpo_orch.orchestrator.samples import (
    FoundSample,
    Link,
    NoSamples,
    SampleFilter,
    SortOrder,
    completion_plain,
    find_step,
    groups_of,
    messages_plain,
    no_samples_reason,
    select,
    stored_steps,
    summary_plain,
)
from grpo_orch.orchestrator.views.events import event_json
from grpo_orch.orchestrator.views.formatting import keep_reasons, start_words
from grpo_orch.orchestrator.views.report import rollback_reports
from grpo_orch.orchestrator.views.view_model import FAILED, NodeState, to_json
from grpo_orch.orchestrator.web.page import Page, PageError, PageRequest
from grpo_orch.orchestrator.web.run_watch import Observation
from grpo_orch.policies.ledger.rentals import spent_over_time
from grpo_orch.policies.model.events import BudgetSet, Diverged

# The first page: curves, step times, machines and the latest events.


def _run(observation: Observation, _: PageRequest) -> dict[str, Any]:
    return {"run": to_json(observation.view)}


RUN = Page("/", _run, "run.html", "Run")


# The stored checkpoints, and the rules that keep each of them.


def _checkpoints(observation: Observation, _: PageRequest) -> dict[str, Any]:
    reasons = keep_reasons(
        observation.reader.checkpoints,
        observation.reader.record.spec,
        observation.reader.state.forks,
        observation.reader.trainer,
    )
    listed = [
        {
            "version": checkpoint.version,
            "created_at_s": checkpoint.created_at_s,
            "size_bytes": checkpoint.size_bytes,
            "pinned": checkpoint.pinned,
            "keep_reasons": list(reasons[checkpoint.at]),
        }
        for checkpoint in reversed(observation.reader.checkpoints)
    ]
    return {"checkpoints": listed}


CHECKPOINTS = Page("/checkpoints", _checkpoints, "checkpoints.html", "Checkpoints")


# Each rollback: its evidence, its start, its changes, and its outcome.


def _rollbacks(observation: Observation, _: PageRequest) -> dict[str, Any]:
    return {"rollbacks": observation.cached("rollbacks", lambda: _all_rollbacks(observation))}


def _all_rollbacks(observation: Observation) -> list[dict[str, Any]]:
    divergences = [
        event for _, _, events in observation.reader.history for event in events if isinstance(event, Diverged)
    ]
    found, timeline = [], 0
    for rollback in rollback_reports(observation.reader):
        trips = [event for event in divergences if event.timeline == timeline]
        words = {"start_text": start_words(rollback.start), "changed": rollback.changed_words}
        evidence = list(trips[-1].evidence) if trips else []
        onset = {"evidence": evidence, "onset_step": trips[-1].onset_step if trips else None}
        found.append({**asdict(rollback), **words, **onset, "discarded_text": rollback.lost_words})
        timeline = rollback.timeline
    return found[::-1]


ROLLBACKS = Page("/rollbacks", _rollbacks, "rollbacks.html", "Rollbacks")


# The cost of the run: by category and over time, on demand, per step, and the forecast.
MONEY_POINTS = 400


def _money(observation: Observation, _: PageRequest) -> dict[str, Any]:
    money = observation.view.money
    return {
        "money": asdict(money),
        "over_time": observation.cached("dollars", lambda: _over_time(observation)),
    }


def _over_time(observation: Observation) -> dict[str, Any]:
    """Return columns of at most MONEY_POINTS values by category, each budget with its start, and the forecast."""
    now_s, money, reader = observation.view.now_s, observation.view.money, observation.reader
    spent = [asdict(at) for at in spent_over_time(reader.history, now_s, reader.controllers(now_s))]
    times_s = np.array([at.pop("time_s") for at in spent])
    drawn_s = times_s if len(spent) <= MONEY_POINTS else np.linspace(times_s[0], times_s[-1], MONEY_POINTS)
    columns = {name: np.array([at[name] for at in spent]) for name in (spent[0] if spent else ())}
    eta_s, forecast = observation.view.eta_s, money.forecast_usd
    return {
        "x": drawn_s.tolist(),
        "usd": {
            name.removesuffix("_usd").replace("_", " "): np.interp(drawn_s, times_s, column).round(4).tolist()
            for name, column in columns.items()
        },
        "budget": _budgets(observation),
        "forecast": None if forecast is None or eta_s is None else {"time": now_s + eta_s, "usd": forecast},
    }


def _budgets(observation: Observation) -> list[tuple[float, float]]:
    """Return the start of each budget, seconds since the epoch, and its USD."""
    first = observation.reader.record.spec.budget.usd
    since_s = observation.reader.history[0][1] if observation.reader.history else observation.view.now_s
    found = [] if first is None else [(since_s, first)]
    found += [
        (at_s, event.usd)
        for _, at_s, events in observation.reader.history
        for event in events
        if isinstance(event, BudgetSet)
    ]
    return found


MONEY = Page("/money", _money, "money.html", "Money")


# The journal: the newest events first, in pages, filtered by kind and text.
EVENTS_ON_A_PAGE = 200
FAR = 10**9


def _events(observation: Observation, request: PageRequest) -> dict[str, Any]:
    kind, word = request.text("kind"), request.text("word")
    first = request.whole("first", 0, 0, FAR)
    found = [
        line
        for line in reversed(observation.reader.events)
        if (not kind or line.type == kind) and word.casefold() in line.text.casefold()
    ]
    return {
        "lines": [event_json(line) for line in found[first : first + EVENTS_ON_A_PAGE]],
        "first": first,
        "total": len(found),
        "kinds": observation.cached("kinds", lambda: sorted({line.type for line in observation.reader.events})),
        "kind": kind,
        "word": word,
        "on_a_page": EVENTS_ON_A_PAGE,
    }


EVENTS = Page("/events", _events, "events.html", "Events")


# The machines now: state, policy, speed and price; ended machines come last.

NODES_ON_A_PAGE = 100
FIRST_NODE_MAX = 10**6


def _nodes_page(observation: Observation, request: PageRequest) -> dict[str, Any]:
    first = request.whole("first", 0, 0, FIRST_NODE_MAX)
    nodes = observation.cached("nodes", lambda: _nodes(observation))
    counts = Counter(node["state"] for node in nodes)
    return {
        "nodes": nodes[first : first + NODES_ON_A_PAGE],
        "first": first,
        "total": len(nodes),
        "counts": dict(counts.most_common()),
        "on_a_page": NODES_ON_A_PAGE,
    }


def states_of(observation: Observation) -> dict[str, str]:
    """Return the current state of each machine."""
    return {node.node: str(node.state) for node in observation.view.nodes}


def _nodes(observation: Observation) -> list[dict[str, Any]]:
    nodes = [
        {**asdict(node), "reason": node.unfit or node.reason, "market": node.market.replace("_", " ")}
        for node in observation.view.nodes
    ]
    return sorted(nodes, key=lambda node: (node["role"] != "trainer", node["state"] in (*FAILED, NodeState.GONE)))


NODES = Page("/nodes", _nodes_page, "nodes.html", "Nodes")


# The completions of a step: groups side by side, filtered by text, reward, node and policy, sorted by reward. The
# page is not refreshed, so that the text stays in place while it is read.

SAMPLES_ON_A_PAGE = 32  # completions
_ONLY = {"": (None, None), "cut": (True, None), "whole": (False, None), "handed_over": (None, True)}


def _samples(observation: Observation, request: PageRequest) -> dict[str, Any]:
    order = SortOrder(request.choice("order", tuple(SortOrder)))
    only = request.choice("only", tuple(_ONLY))
    first = request.whole("first", 0, 0, FAR)
    words = {name: request.text(name) for name in ("step", "search", "low", "high", "node", "policy")}
    wanted = SampleFilter(
        search=words["search"],
        reward_min=_number(request, "low"),
        reward_max=_number(request, "high"),
        node=words["node"],
        policy=words["policy"],
        cut=_ONLY[only][0],
        handed_over=_ONLY[only][1],
    )
    asked_for = {**words, "order": str(order), "only": only}
    steps = stored_steps(observation.reader.store)
    if not steps:
        return {
            "no_samples_reason": no_samples_reason(observation.reader.store),
            "asked_for": asked_for,
            "groups": [],
        }
    try:
        step = find_step(steps, words["step"])
    except NoSamples as error:
        raise PageError(404, str(error)) from None
    chosen, summary = select(
        step, groups_of(observation.reader.store, step), wanted, order, SAMPLES_ON_A_PAGE, first
    )
    index = steps.index(step)
    return {
        **summary_plain(step, summary),
        "no_samples_reason": "",
        "before": str(steps[index - 1]) if index else None,
        "after": str(steps[index + 1]) if index + 1 < len(steps) else None,
        "steps": len(steps),
        "first": first,
        "on_a_page": SAMPLES_ON_A_PAGE,
        "asked_for": {**asked_for, "step": str(step)},
        "groups": [
            {
                "group": number,
                "prompt": messages_plain(rows[0].group.prompt),
                "completions": [completion_plain(row) for row in rows],
            }
            for number, found in groupby(chosen, key=lambda row: row.link.group)
            for rows in [list(found)]
        ],
    }


def _number(request: PageRequest, name: str) -> float | None:
    return request.number(name, 0.0, -1e9, 1e9) if request.text(name) else None


SAMPLES = Page("/samples", _samples, "samples.html", "Samples")


# A single completion in full, at a URL that is valid as long as the samples of its step are kept.


def _sample(observation: Observation, request: PageRequest) -> dict[str, Any]:
    try:
        link = Link.parse("/".join(request.text(name) for name in ("step", "group", "index")))
        step = find_step(stored_steps(observation.reader.store), link.step)
    except NoSamples as error:
        raise PageError(404, str(error)) from None
    for number, head, group in groups_of(observation.reader.store, step):
        if number == link.group and link.index < len(group.samples):
            found = FoundSample(link, head, group, group.samples[link.index])
            return {
                "step": str(step),
                "prompt": messages_plain(group.prompt),
                "completion": completion_plain(found),
                "beside": len(group.samples),
            }
    raise PageError(404, f"step {step} has no completion {link.group}/{link.index}")


SAMPLE = Page("/samples/{step}/{group}/{index}", _sample, "sample.html")
