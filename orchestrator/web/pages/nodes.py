"""The machines now: what each is at, what it holds, how fast it is and what it costs; the lost come last."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from orchestrator.views.measured import FAILED, NodeState
from orchestrator.web.page import Asked, Page
from orchestrator.web.watch import Look
from policies.model.vocabulary import machine_of
from policies.serving.gateway_status import MemberStatus

ON_A_PAGE = 100
FAR = 10**6


def _data(look: Look, asked: Asked) -> dict[str, Any]:
    first = asked.whole("first", 0, 0, FAR)
    told = look.once("nodes", lambda: _nodes(look))
    counts = Counter(node["state"] for node in told)
    return {
        "nodes": told[first : first + ON_A_PAGE],
        "first": first,
        "total": len(told),
        "counts": dict(counts.most_common()),
        "on_a_page": ON_A_PAGE,
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


PAGE = Page("/nodes", _data, "nodes.html", "Nodes")
