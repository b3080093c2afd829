"""Damaged optional data is reported once and left out; a damaged document that steers the run is Corrupt."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.journal import Journal, Record
from grpo_orch.checkpoint.records import documents, metrics
from grpo_orch.checkpoint.records.documents import GatewayAddress, Lease, MachineReport, RunRecord
from grpo_orch.checkpoint.records.metrics import MetricsRow, MetricsWriter
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import from_json, to_json
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.checkpoint.store.errors import Corrupt
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream.catalog import Catalog, Checkpoint, Revision
from grpo_orch.orchestrator.control.controller import Controller
from grpo_orch.orchestrator.control.observe import COMMANDS_EVERY_S, Observer
from grpo_orch.orchestrator.views.view_model import to_json as view_json
from grpo_orch.policies.detect.divergence import Health, Verdict
from grpo_orch.policies.fleet.budget import BUDGET
from grpo_orch.policies.model.events import DocumentUnreadable, RunCreated
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import MachineState, RunPhase
from grpo_orch.policies.serving.gateway_status import GatewayStatus, MembershipChange, MemberStatus
from grpo_orch.policies.serving.wire import Completion
from grpo_orch.policies.tick.snapshot import Action, Command, Launch, LaunchRefused, Machine, Trainer
from tests.budget import examples
from tests.generators.views_world import run_view
from tests.stand_ins.world import spec

names = itertools.count()
NOW_S = 1000.0
BEAT = Trainer("trainer-0-i1", 1, 0, 4, 10, "training", NOW_S, kl=0.1, stored_step=2, verdict=Verdict(step=4))
ROWS = [MetricsRow(0, step, NOW_S + step, 1, {"kl": 0.1, "reward": 0.5}) for step in range(1, 5)]
MEMBERS = GatewayStatus(
    "g1",
    "0-4@1f2e",
    [MemberStatus("rollout-0-i1", "b", "10.0.0.2:1", "0-4@1f2e", True, False, 4, 0.1)],
    seq=1,
    up_s=60.0,
    changes=[MembershipChange(1, 2.0, "rollout-0-i1: joined")],
)
ROWS_KEY = layout.metrics_chunk(0, 0)
COMMAND_ID = "000000000000001-ab"
COMMAND_KEY = layout.command(COMMAND_ID)
# Every optional object that a tick or a view reads, as it is when nothing is wrong.
OPTIONAL: dict[str, bytes] = {
    layout.gateway(BEAT.precedence): to_json(GatewayAddress("http://10.0.0.1:1", "g1")),
    layout.members(BEAT.precedence): to_json(MEMBERS),
    layout.TRAINER: to_json(BEAT),
    layout.LEASE: to_json(Lease("h/1", "h", 1, "", 1, NOW_S, 15.0, NOW_S)),
    COMMAND_KEY: to_json(Command(COMMAND_ID, "rollback", "0-2", {"beta": 0.5})),
    ROWS_KEY: b"".join(to_json(row) + b"\n" for row in ROWS),
}


class Machines:
    """A cloud that shows what it was asked for as up."""

    def __init__(self) -> None:
        self.up: dict[str, Machine] = {}

    def machines(self) -> dict[str, Machine]:
        return dict(self.up)


class Hands:
    """Acts at once."""

    def __init__(self, cloud: Machines) -> None:
        self._cloud = cloud
        self.asked: list[Action] = []

    def collect(self) -> tuple[LaunchRefused, ...]:
        return ()

    def submit(self, actions: tuple[Action, ...], fence: Callable[[], None]) -> None:
        fence()
        self.asked += actions
        for action in actions:
            if isinstance(action, Launch):
                self._cloud.up[action.node] = Machine(action.node, MachineState.UP, action.attempt)


class Steered:
    """A run under a real controller and observer, in a store of its own."""

    def __init__(self) -> None:
        self.store = Store(f"memory://unreadable-{next(names)}", retry_s=0.0)
        documents.create_run(self.store, RunRecord(documents.SCHEMA, "sim-0", NOW_S, spec()))
        writer = Journal(self.store, "a/1")
        self.cloud = Machines()
        state = writer.take_over(NOW_S, "a", 1, "up")
        self._ticks = 0
        observer = Observer(self.store, self.cloud, spec(), lambda: self._ticks * COMMANDS_EVERY_S)  # type: ignore[arg-type]  # of a cloud it wants the machines alone
        hands = Hands(self.cloud)
        self.controller = Controller(self.store, spec(), writer, state, observer, hands)  # type: ignore[arg-type]
        self.controller.record(NOW_S, (RunCreated("sim", "sim-0"),))

    def ticks(self, count: int = 3) -> None:
        for _ in range(count):
            self.controller.tick(NOW_S + self._ticks)
            self._ticks += 1

    def told(self) -> list[str]:
        events = (event for record in journal.read(self.store) for event in record.decoded())
        return [event.key for event in events if isinstance(event, DocumentUnreadable)]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        b"[]",
        OPTIONAL[COMMAND_KEY].replace(b"0-2", b"0-xyz"),
        b'{"a":' * 9999,
        to_json(Command(COMMAND_ID, BUDGET)),
    ],
)
def test_unreadable_command_is_reported_once_and_moved_aside(data: bytes) -> None:
    run = Steered()
    run.store.put(COMMAND_KEY, data)
    run.ticks()
    documents.send_command(run.store, "down", NOW_S)
    run.ticks()
    assert run.controller.state.phase in (RunPhase.STOPPING, RunPhase.STOPPED)
    assert run.told() == [COMMAND_KEY]
    assert run.store.get(layout.aside(COMMAND_KEY)) == data
    assert run.store.entries(layout.COMMANDS) == []
    assert [one["key"] for one in view_json(run_view(run.store, NOW_S, None))["unreadable"]] == [COMMAND_KEY]


def test_torn_row_is_reported_once_and_others_are_followed() -> None:
    run = Steered()
    whole = OPTIONAL[ROWS_KEY].splitlines()
    run.store.put(ROWS_KEY, b"\n".join([whole[0], whole[1][:30], *whole[2:]]))
    documents.TRAINER.write(run.store, BEAT)
    run.ticks()
    assert run.told() == [ROWS_KEY]
    assert [row.step for row in metrics.read_metrics(run.store)] == [1, 3, 4]
    assert run.controller.state.nodes, "the fleet is asked for all the same"
    view = run_view(run.store, NOW_S, None)
    assert ([point.step for point in view.recent], view.kl) == ([1, 3, 4], 0.1)


def test_tick_continues_without_step_measurements() -> None:
    run = Steered()
    values = {metrics.GENERATE_S: 5e-324, metrics.GENERATE_NODE_S: 1.0}
    run.store.put(ROWS_KEY, b"".join(to_json(MetricsRow(0, n, NOW_S + n, 1, values)) + b"\n" for n in range(1, 9)))
    documents.TRAINER.write(run.store, replace(BEAT, step=8))
    run.ticks()
    assert run.told() == ["metrics"]
    assert run.controller.state.nodes, "the fleet is asked for all the same"


def test_a_trainer_that_starts_again_writes_over_a_torn_row() -> None:
    store = Store(f"memory://unreadable-{next(names)}")
    store.put(ROWS_KEY, OPTIONAL[ROWS_KEY][:-20])
    MetricsWriter(store).append(MetricsRow(0, 5, NOW_S, 2, {"kl": 0.2}))
    assert [row.step for row in metrics.read_metrics(store)] == [1, 2, 3, 5]


def test_a_row_that_belongs_to_another_object_is_left_out() -> None:
    """Else one false step would blind the detectors to all later ones."""
    store = Store(f"memory://unreadable-{next(names)}")
    store.put(ROWS_KEY, to_json(MetricsRow(0, 10**9, NOW_S, 1, {"kl": 0.1})) + b"\n" + OPTIONAL[ROWS_KEY])
    assert metrics.read_metrics(store) == ROWS


def test_damaged_report_of_a_machine_hides_no_other() -> None:
    store, unreadable = Store(f"memory://unreadable-{next(names)}"), UnreadableDocuments()
    good = MachineReport("rollout-1-i1", 1, None, False)
    documents.machine(good.node).write(store, good)
    for data in (b"", to_json(good)):
        store.put(layout.machine("rollout-0-i1"), data)
        said = [documents.machine(f"rollout-{number}-i1").read(store, unreadable) for number in (0, 1)]
        assert said == [None, good]
    assert list(unreadable.found) == [layout.machine("rollout-0-i1")]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
HOSTILE = st.sampled_from(
    [b"", b"\x00" * 40, b"\xff\xfe{}", b"NaN", b"{}", b"[]", b"[" * 20_000, b'{"a":' * 20_000, b"7" * 2**21]
)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """What may replace a good object: bytes, a torn piece, or JSON of almost the right shape."""
    match draw(st.integers(0, 4)):
        case 0:
            return draw(HOSTILE | st.binary(max_size=60))
        case 1:
            return whole[: draw(st.integers(0, len(whole)))]
        case 2:
            at = draw(st.integers(0, len(whole)))
            return whole[:at] + draw(st.binary(max_size=4)) + whole[at + draw(st.integers(0, 4)) :]
        case 3:
            return json.dumps(draw(JSON_VALUES)).encode()
    lines = [json.loads(line) for line in whole.splitlines()]
    target: Any = draw(st.sampled_from(lines))
    while isinstance(below := target[draw(st.sampled_from(sorted(target)))], dict) and below:
        target = below
    key = draw(st.sampled_from(sorted(target)))
    value = draw(JSON_VALUES)
    text = "\n".join(json.dumps(line) for line in lines)
    if draw(st.booleans()):  # the same key twice
        return text.replace(f'"{key}":', f'"{key}": {json.dumps(value)}, "{key}":', 1).encode()
    target[key] = value
    return "\n".join(json.dumps(line) for line in lines).encode()


@settings(max_examples=examples(200), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_tick_continues_with_any_unreadable_optional_data(data: st.DataObject) -> None:
    run = Steered()
    run.ticks(1)
    bad = data.draw(st.sets(st.sampled_from(sorted(OPTIONAL)), min_size=1, max_size=2), label="damaged")
    for key, whole in OPTIONAL.items():
        if key != COMMAND_KEY or key in bad:
            run.store.put(key, data.draw(damaged(whole), label=key) if key in bad else whole)
    run.ticks()
    run_view(run.store, NOW_S, MEMBERS)
    assert len(run.told()) == len(set(run.told()))
    for key, whole in OPTIONAL.items():
        if key != COMMAND_KEY:
            run.store.put(key, whole)
    documents.send_command(run.store, "down", NOW_S)
    run.ticks(4)
    assert run.controller.state == journal.recover(run.store).state
    assert run.controller.state.phase in (RunPhase.STOPPING, RunPhase.STOPPED, RunPhase.FAILED)


def test_readable_run_reports_nothing() -> None:
    run = Steered()
    for key, whole in OPTIONAL.items():
        if key != COMMAND_KEY:
            run.store.put(key, whole)
    run.ticks()
    assert run.told() == []
    assert run.controller.state.suspected is None
    assert run_view(run.store, NOW_S, None).health.health is Health.HEALTHY


# A damaged document of the store is Corrupt, which names it: no reader meets its content as another error.

CHECKPOINT = Checkpoint("0", "checkpoints/0000/00000002-ab.json", "d", 1.0, 10)
RUN = to_json(RunRecord(documents.SCHEMA, "sim-0", 1.0, spec()))
COMPLETION = Completion(0, [1], [-0.5], "stop", "0-2", "rollout-0-i1")


def store_with(key: str, data: bytes) -> Store:
    store = Store(f"memory://damaged-{next(names)}", retry_s=0.0)
    store.put(key, data)
    return store


@pytest.mark.parametrize(
    ("key", "data", "read"),
    [
        (
            layout.catalog_revision(1),
            to_json(Revision(number=1, checkpoints=[CHECKPOINT])),
            lambda s: Catalog(s, "w").newest(),
        ),
        (layout.timeline(1), to_json(Fork(1, "0")), documents.read_forks),
        (layout.journal_entry(1), to_json(Record(1, 1, 1, "w", "n", 1.0, [{"type": []}])), journal.recover),
        (layout.RUN, RUN.replace(b'"sim-0"', b'"\xff"'), documents.read_run),
        (layout.RUN, b"{", documents.read_run),
        (layout.CONTROLLER, b"{", documents.CONTROLLER.read),
        (layout.TRAINER, to_json(BEAT).replace(b'"step":4', b'"step":4' + b"0" * 20), documents.TRAINER.read),
    ],
)
def test_document_with_impossible_content_is_corrupt(
    key: str, data: bytes, read: Callable[[Store], object]
) -> None:
    with pytest.raises(Corrupt):
        read(store_with(key, data))


def test_digits_in_a_text_are_no_integer() -> None:
    text = "7" * 64
    assert from_json(to_json({"digest": text, "size": 2**63}), dict[str, str | int], "k") == {
        "digest": text,
        "size": 2**63,
    }
