"""Views of runs as hypothesis makes them up: long names and reasons, wide characters, many machines."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from checkpoint.records.metrics import Row
from orchestrator.views.events import EventLine
from orchestrator.views.measured import NodeState, StepSplit, WeightsView
from orchestrator.views.model import (
    CheckpointView,
    DaemonView,
    DeadlineView,
    FleetView,
    HealthView,
    MoneyView,
    NodeView,
    RollbackView,
    RunView,
    StoppedKindView,
)
from policies.detect.divergence import Health
from policies.model.vocabulary import Cause, Market, NodePhase, Role, RollbackStage, RunPhase
from policies.serving.joining import BASE_MODEL, Stage

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
seconds = st.one_of(st.floats(0, 100), st.floats(0, 1e6))
steps = st.integers(0, 10**6)
numbers = st.one_of(st.none(), st.floats(-1e12, 1e12), st.floats(-1, 1))
versions = st.builds(lambda timeline, step: f"{timeline}-{step}", st.integers(0, 40), steps)


@st.composite
def node_views(draw: st.DrawFn) -> NodeView:
    role = draw(st.sampled_from(Role))
    slot = f"{role}-{draw(st.integers(0, 9999))}"
    engines = draw(st.sampled_from([1, 8]))
    return NodeView(
        slot=slot,
        node=f"{slot}-i{draw(st.integers(1, 999))}",
        role=role,
        phase=draw(st.sampled_from(NodePhase)),
        reason=draw(reasons),
        market=draw(st.sampled_from(Market)),
        policy=draw(st.none() | versions),
        restarts=draw(st.integers(0, 999)),
        since_s=NOW_S - draw(seconds),
        price_usd_per_h=draw(st.floats(0, 999)),
        unfit=draw(st.just("") | reasons),
        stage=draw(st.none() | st.just(Stage(BASE_MODEL, 10**9, 10**12))),
        engines=engines,
        engines_serving=draw(st.integers(0, engines)),
        pool=draw(st.sampled_from(["", "aws/us-east-1/us-east-1b p5.48xlarge H100:8 spot", f"k8s/{'z' * 60} m"])),
        state=draw(st.sampled_from(NodeState)),
        tokens_per_s=draw(st.none() | amounts),
    )


@st.composite
def fleets(draw: st.DrawFn) -> tuple[NodeView, ...]:
    """A few machines of any kind, or hundreds of a few kinds."""
    found = draw(st.lists(node_views(), max_size=9))
    times = draw(st.sampled_from([1, 1, 1, 40]))
    many = [replace(one, node=f"{one.slot}{place}-i7") for place in range(times) for one in found]
    return tuple(many if times > 1 else found)


moneys = st.builds(
    MoneyView,
    spent_usd=amounts,
    all_on_demand_usd=amounts,
    usd_per_h=amounts,
    usd_per_step=st.none() | amounts,
    usd_per_million_tokens=st.none() | amounts,
    forecast_usd=st.none() | amounts,
    budget_usd=st.none() | amounts,
    not_counted=st.just(""),
)
rollbacks = st.builds(
    RollbackView,
    timeline=st.integers(1, 40),
    cause=st.sampled_from(Cause),
    reason=reasons,
    from_step=steps,
    start=st.none() | versions,
    stage=st.sampled_from(RollbackStage),
    since_s=st.just(NOW_S - 3),
    probation_until_step=steps,
    text=reasons,
)
rows = st.builds(
    lambda step, reward, kl: Row(
        0, step, NOW_S, 1, {name: value for name, value in (("reward", reward), ("kl", kl)) if value is not None}
    ),
    steps,
    numbers,
    numbers,
)
event_lines = st.builds(lambda text: EventLine(1, 0, 1, NOW_S, "T", {}, text), reasons)
weights = st.builds(
    WeightsView,
    policies=st.just(1),
    weights_bytes=st.floats(0, 1e13),
    sent_bytes=st.floats(0, 1e13),
    publish_s=seconds,
    encode_s=seconds,
    members=st.just(1000),
    ready=st.integers(0, 1000),
    first_ready_s=st.none() | seconds,
    last_ready_s=st.none() | seconds,
)
deadlines = st.builds(
    DeadlineView,
    deadline_s=seconds.map(lambda left_s: NOW_S + left_s),
    expected_step=st.none() | steps.map(float),
    behind=st.none() | st.booleans(),
    nodes=st.none() | st.integers(0, 999),
    end_s=st.none() | st.floats(NOW_S, 1e300),
    ended_s=st.none() | seconds.map(lambda ago_s: NOW_S - ago_s),
)
run_views = st.builds(
    RunView,
    name=names,
    store=st.builds(lambda name: f"s3://{'bucket' * 9}/{name}", names),
    now_s=st.just(NOW_S),
    phase=st.sampled_from(RunPhase),
    reason=reasons,
    timeline=st.integers(0, 40),
    rollbacks=st.integers(0, 40),
    rollback=st.none() | rollbacks,
    health=st.builds(
        HealthView,
        st.sampled_from(Health),
        steps,
        steps,
        st.lists(reasons, max_size=3).map(lambda some: tuple(some)),
    ),
    step=steps,
    max_steps=st.none() | steps,
    activity=st.none() | reasons,
    reward=numbers,
    kl=numbers,
    kl_limit=st.none() | st.floats(0, 1e9),
    step_s=st.none() | seconds,
    tokens_per_s=st.none() | amounts,
    eta_s=st.none() | seconds,
    requests_waiting=st.none() | st.integers(0, 10**6),
    nodes=fleets(),
    fleet=st.none()
    | st.builds(FleetView, st.integers(0, 999), st.none() | seconds, seconds, st.none() | seconds, reasons),
    money=moneys,
    not_bought=st.lists(
        st.builds(StoppedKindView, st.just("rollout on spot"), reasons, st.just(NOW_S), st.just(NOW_S), steps),
        max_size=2,
    ).map(lambda some: tuple(some)),
    checkpoint=st.none() | st.builds(CheckpointView, versions, seconds),
    store_slow=st.booleans(),
    set_aside=st.just(()),
    daemon=st.builds(DaemonView, st.booleans(), reasons, st.integers(1, 10**7)),
    recent=st.lists(rows, max_size=5).map(lambda some: tuple(some)),
    events=st.lists(event_lines, max_size=8).map(lambda some: tuple(some)),
    weights=st.none() | weights,
    deadline=st.none() | deadlines,
    step_split=st.none() | st.builds(StepSplit, seconds, seconds, seconds, seconds),
)
