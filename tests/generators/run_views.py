"""Views of runs as hypothesis makes them up: long names and reasons, wide characters, many machines."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from enum import Enum
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from grpo_orch.checkpoint.records.metrics import MetricsRow
from grpo_orch.orchestrator.views.view_model import NodeView, RunView
from grpo_orch.policies.model.vocabulary import Role
from grpo_orch.policies.serving.joining import BASE_MODEL, Stage

NOW_S = 1_700_000_000.0
WORDS = [
    "x" * 99,
    "no",
    "capacity",
    "in",
    "us-east-1b,",
    "容量不足のため",
    "エラー" * 40,
    "🚀🚀",
    "e\u0301" * 9,
    "\u202eevil",
    "\x1b[31m",
    "line\nfeed",
    "tab\there",
    "[red]",
    "1,234,567.89",
    "https://a.very.long.host.example/with/a/path/that/goes/on/and/on/and/on/for/ever/and/ever/and/more",
]
reasons = st.lists(
    st.one_of(
        st.sampled_from(WORDS),
        st.text(st.characters(exclude_categories=["Nd"], exclude_characters="…"), max_size=30),
    ),
    max_size=30,
).map(" ".join)
names = st.from_regex(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True)
amounts = st.one_of(st.floats(0, 10), st.floats(0, 1e7))
steps = st.integers(0, 10**6)
values = st.none() | st.floats(-1e12, 1e12) | st.floats(-1, 1)
versions = st.builds(lambda timeline, step: f"{timeline}-{step}", st.integers(0, 40), steps)
rows = st.builds(
    lambda step, reward, kl: MetricsRow(
        0, step, NOW_S, 1, {name: value for name, value in (("reward", reward), ("kl", kl)) if value is not None}
    ),
    steps,
    values,
    values,
)
pools = st.sampled_from(["", "aws/us-east-1/us-east-1b p5.48xlarge H100:8 spot", f"k8s/{'z' * 60} m"])
BY_TYPE: dict[object, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(0, 10**6),
    float: amounts,
    str: reasons,
    MetricsRow: rows,
    Stage: st.just(Stage(BASE_MODEL, 10**9, 10**12)),
    dict[str, Any]: st.just({}),
}
# What a run has not of any value that its type allows.
BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "name": names,
    "store": names.map(lambda name: f"s3://{'bucket' * 9}/{name}"),
    "now_s": st.just(NOW_S),
    "since_s": amounts.map(lambda ago_s: NOW_S - ago_s),
    "deadline_s": amounts.map(lambda left_s: NOW_S + left_s),
    "end_s": st.none() | st.floats(NOW_S, 1e300),
    "reward": values,
    "kl": values,
    "pool": pools,
    "policy": st.none() | versions,
    "version": versions,
    "start": st.none() | versions,
    "kind": st.just("rollout on spot"),
    "timeline": st.integers(0, 40),
    "price_usd_per_h": st.floats(0, 999),
    "evidence": st.lists(reasons, max_size=3).map(tuple),
    "not_counted": st.just(""),
    "unreadable": st.just(()),
    "parked_s": st.none(),
}


def made(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Any instance of a dataclass."""
    hints = get_type_hints(kind)
    fields = [field.name for field in dataclasses.fields(kind)]
    return st.builds(kind, **{name: BY_NAME[name] if name in BY_NAME else of(hints[name]) for name in fields})


def of(hint: Any) -> st.SearchStrategy[Any]:
    if hint in BY_TYPE:
        return BY_TYPE[hint]
    parts = get_args(hint)
    if get_origin(hint) is tuple:
        return st.lists(of(parts[0]), max_size=5).map(tuple)
    if NoneType in parts:
        return st.none() | of(parts[0])
    return st.sampled_from(hint) if issubclass(hint, Enum) else made(hint)


@st.composite
def node_views(draw: st.DrawFn) -> NodeView:
    role = draw(st.sampled_from(Role))
    slot = f"{role}-{draw(st.integers(0, 9999))}"
    engines = draw(st.sampled_from([1, 8]))
    serving = draw(st.integers(0, engines))
    node = f"{slot}-i{draw(st.integers(1, 999))}"
    unfit = draw(st.just("") | reasons)
    node_view: NodeView = draw(made(NodeView))
    drawn = replace(node_view, role=role, slot=slot, node=node, unfit=unfit, engines=engines)
    return replace(drawn, engines_serving=serving)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[NodeView, ...]:
    """A few machines of any kind, or hundreds of a few kinds."""
    found = draw(st.lists(node_views(), max_size=9))
    times = draw(st.sampled_from([1, 1, 1, 40]))
    many = [replace(one, node=f"{one.slot}{place}-i7") for place in range(times) for one in found]
    return tuple(many if times > 1 else found)


BY_NAME["nodes"] = fleets()
run_views: st.SearchStrategy[RunView] = made(RunView)
