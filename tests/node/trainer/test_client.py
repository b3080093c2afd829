"""The trainer's client towards the gateway, against a stand-in that answers, stalls and breaks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint.records import metrics, rollouts
from checkpoint.records.rollouts import Rollout
from checkpoint.store import layout
from checkpoint.store.run_store import Store
from checkpoint.stream import transfer
from checkpoint.stream.catalog import Catalog
from checkpoint.stream.manifest import files_below
from policies.control.snapshot import Trainer
from policies.model.spec import OnBadPrompt
from policies.model.vocabulary import PolicyVersion, Precedence
from policies.serving.pieces import in_pieces
from policies.serving.seeds import request_seed
from policies.serving.wire import Batch, BatchLine, CompletionRequest, PolicyRef, Progress
from tasks.completions import gateway_client
from tasks.completions.gateway_client import RETRY_S, GatewayClient, GenerationFailed, _Call
from tasks.completions.refused_prompts import NONE_TAKEN, BadPrompts, RefusedPrompts
from tasks.completions.rollout_source import EVALUATION_CALLS, RolloutSource
from tasks.storing.heartbeat import Heartbeat
from tasks.storing.restoring import restore_newest
from tasks.storing.step_costs import StepCosts
from tests.budget import HANG_S
from tests.node.trainer.stand_in_gateway import TOKEN, StandInGateway

LENGTH = 5
BY = (0, 1, 1)
SAMPLING = {"max_tokens": LENGTH, "temperature": 1.0}


class World:
    def __init__(self, folder: Path) -> None:
        self.store = Store(f"file://{folder}/store")
        self.gateway = StandInGateway(self.store, folder / "scratch", model=False)
        self.heartbeat = Heartbeat(self.store, Trainer("trainer-0-i1", 1, 0, 0, 0, "starting", 0.0))
        self.costs = StepCosts()
        self.rule: OnBadPrompt = "skip"

    def client(self, token: str = TOKEN, interrupt: Callable[[], None] = lambda: None) -> GatewayClient:
        return GatewayClient(self.store, token, self.heartbeat, interrupt)

    def source(
        self, by: Precedence = BY, token: str = TOKEN, may_go_on: Callable[[], None] = lambda: None
    ) -> RolloutSource:
        refused, client = RefusedPrompts(self.rule, self.costs), self.client(token)
        refused.row_of = lambda prompt: 100 + prompt[0]
        return RolloutSource(
            self.store,
            client,
            self.heartbeat,
            self.costs,
            refused,
            by=by,
            run_seed=42,
            deadline_s=HANG_S,
            may_go_on=may_go_on,
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def batch(count: int = 6, deadline_s: float = HANG_S) -> Batch:
    requests = [CompletionRequest(index, [5, 6, 7], 1000 + index) for index in range(count)]
    return Batch(PolicyRef("0-3", "policies/0000/00000003"), SAMPLING, requests, deadline_s)


def test_a_cut_batch_is_finished_with_what_is_missing(world: World) -> None:
    world.gateway.cut_after = 2
    world.gateway.open()
    got = world.client().complete(batch())
    world.gateway.close()
    assert [one.index for one in got.completions] == list(range(6))
    assert [seed for _, seed in world.gateway.asked] == [*range(1000, 1006), *range(1002, 1006)]
    assert got.discarded == LENGTH
    assert got.wait_s > 0


def test_more_than_a_gateway_takes_at_once_is_asked_for_in_parts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_client, "in_pieces", functools.partial(in_pieces, requests_max=4))
    world.gateway.cut_after = 2
    world.gateway.open()
    arrived: list[int] = []
    got = world.client().complete(batch(count=10), lambda one: arrived.append(one.index))
    world.gateway.close()
    assert [one.index for one in got.completions] == arrived == list(range(10))
    assert world.gateway.batches == [4, 2, 4, 2]
    assert got.discarded == LENGTH
    assert world.client().complete(batch(count=0)).completions == []


def test_a_prompt_without_a_token_is_refused_and_keeps_no_other_from_the_gateway(world: World) -> None:
    world.gateway.open()
    asked = batch()
    empty = [replace(one, prompt_token_ids=[]) if one.index in (0, 3) else one for one in asked.requests]
    got = world.client().complete(replace(asked, requests=empty))
    world.gateway.close()
    assert [one.index for one in got.completions] == list(range(6))
    assert [one.refused for one in got.completions if one.refused] == 2 * ["the prompt has no token"]
    assert [seed for _, seed in world.gateway.asked] == [1001, 1002, 1004, 1005]


def test_a_batch_that_is_served_at_once_has_not_waited(world: World) -> None:
    world.gateway.open()
    began_s = time.monotonic()
    got = world.client().complete(batch())
    world.gateway.close()
    assert (got.discarded, got.wait_s) == (0, 0.0), f"of {time.monotonic() - began_s} s"


def test_a_gateway_that_is_not_there_yet_is_waited_for(world: World) -> None:
    opened: list[bool] = []

    def opens() -> None:
        """Once it has looked for it in vain."""
        if not opened:
            world.gateway.open()
            opened.append(True)

    began_s = time.monotonic()
    got = world.client(interrupt=opens).complete(batch())
    world.gateway.close()
    assert len(got.completions) == 6
    assert RETRY_S <= got.wait_s <= time.monotonic() - began_s


def test_nothing_until_the_deadline_is_an_error(world: World) -> None:
    world.gateway.members = 0
    world.gateway.open()
    with pytest.raises(GenerationFailed, match="no token for"):
        world.client().complete(batch(deadline_s=0.5))
    world.gateway.members = 1
    world.gateway.close()


def test_a_node_that_gets_on_is_waited_for_and_a_new_connection_is_no_such_thing() -> None:
    call = _Call(batch())
    for moves, moved in ((0, False), (1, True), (1, False), (3, True), (0, False), (1, True)):
        before_s = call._moved_s = -1.0
        call.hear(BatchLine(progress=Progress(0, 0, 0, 6, moves)))
        assert (call._moved_s > before_s) is moved, moves
    call.cut()
    call._moved_s = -1.0
    call.hear(BatchLine(progress=Progress(0, 0, 0, 6, 1)))
    assert call._moved_s == -1.0


def test_a_refused_token_is_an_error_at_once(world: World) -> None:
    world.gateway.open()
    with pytest.raises(GenerationFailed, match="401"):
        world.client(token="wrong").complete(batch())
    world.gateway.close()


def test_a_journalled_call_is_not_made_again(world: World) -> None:
    world.gateway.open()
    version, prompts = PolicyVersion(0, 3), [[5, 6], [7, 8]]
    ref = PolicyRef(str(version), layout.policy(version, (0, 1, 1)))
    first = world.source().complete(version, prompts, 2, SAMPLING, training=True, policies=lambda _: ref)
    asked = len(world.gateway.asked)
    world.gateway.close()

    def publish(_: PolicyVersion) -> PolicyRef:
        raise AssertionError("weights of a replayed step were published")

    again = world.source().complete(version, prompts, 2, SAMPLING, training=True, policies=publish)
    assert again == first
    assert len(world.gateway.asked) == asked == 4
    assert world.costs.take()["orch/replayed"] == 0  # one of the two was not
    expected = [request_seed(42, 0, 3, 0, prompt, sample) for prompt in (0, 1) for sample in (0, 1)]
    assert [seed for _, seed in world.gateway.asked] == expected


@pytest.mark.parametrize("change", ["prompts", "sampling", "damage"])
def test_a_record_of_other_requests_is_not_taken(change: str, world: World) -> None:
    world.gateway.open()
    version, prompts, sampling = PolicyVersion(0, 3), [[5, 6]], dict(SAMPLING)
    ref = PolicyRef(str(version), layout.policy(version, (0, 1, 1)))
    world.source().complete(version, prompts, 2, sampling, training=True, policies=lambda _: ref)
    match change:
        case "prompts":
            prompts = [[5, 9]]
        case "sampling":
            sampling["temperature"] = 0.7
        case _:
            key = layout.rollout(version, 0, BY)
            world.store.put(key, world.store.get(key)[:-20])
    world.source().complete(version, prompts, 2, sampling, training=True, policies=lambda _: ref)
    world.gateway.close()
    assert len(world.gateway.asked) == 4
    kept = rollouts.read_rollout(world.store, layout.rollout(version, 0, BY))
    assert kept is not None
    assert len(kept.completions) == 2


def test_behind_a_step_that_was_made_anew_nothing_is_replayed(world: World) -> None:
    """Its completions may be others, and the weights behind it then are not those of the records."""
    world.gateway.open()
    prompts, steps = [[5, 6]], range(3, 6)

    def complete(source: RolloutSource, step: int) -> None:
        version = PolicyVersion(0, step)
        ref = PolicyRef(str(version), layout.policy(version, (0, 1, 1)))
        for training in (False, True, True):
            source.complete(version, prompts, 1, SAMPLING, training=training, policies=lambda _: ref)

    def asked_for(source: RolloutSource) -> list[int]:
        counts = []
        for step in steps:
            before = len(world.gateway.asked)
            complete(source, step)
            counts.append(len(world.gateway.asked) - before)
        return counts

    assert asked_for(world.source()) == [3, 3, 3]
    world.store.delete([layout.rollout(PolicyVersion(0, 3), EVALUATION_CALLS, BY)])
    assert asked_for(world.source((0, 1, 2))) == [1, 0, 0], "an evaluation moves no weights"
    world.store.delete([layout.rollout(PolicyVersion(0, 4), 0, BY)])
    assert asked_for(world.source((0, 1, 3))) == [0, 1, 3], "the other call of that step is of the same weights"
    world.gateway.close()


def test_what_a_replaced_trainer_stores_late_is_not_replayed(world: World) -> None:
    """Nor does it replace anything; what is the newest trainer's counts."""
    world.gateway.open()
    version, prompts = PolicyVersion(0, 3), [[5, 6]]
    ref = PolicyRef(str(version), layout.policy(version, (0, 1, 1)))

    def complete(source: RolloutSource) -> Rollout:
        return source.complete(version, prompts, 2, SAMPLING, training=True, policies=lambda _: ref)

    complete(world.source((0, 2, 1)))
    newer = layout.rollout(version, 0, (0, 2, 1))
    stored = world.store.get(newer)
    record = rollouts.read_rollout(world.store, newer)
    assert record is not None
    late = replace(record, completions=[replace(one, token_ids=[9] * LENGTH) for one in record.completions])
    rollouts.write_rollout(world.store, late, (0, 1, 7))
    assert world.store.get(newer) == stored
    assert complete(world.source((0, 3, 1))) == record
    world.store.delete([newer])
    assert complete(world.source((0, 3, 1))) == late, "what there is, is used"
    world.gateway.close()
    assert len(world.gateway.asked) == 2


def test_calls_are_numbered_within_step_and_kind(world: World) -> None:
    """Whether a step was evaluated before it generates, as after a restart, must not move its seeds."""
    world.gateway.open()
    source, version = world.source(), PolicyVersion(0, 3)
    ref = PolicyRef(str(version), layout.policy(version, (0, 1, 1)))
    for training in (False, False, True, True):
        source.complete(version, [[5]], 1, SAMPLING, training=training, policies=lambda _: ref)
    world.gateway.close()
    calls = [EVALUATION_CALLS, EVALUATION_CALLS + 1, 0, 1]
    assert [seed for _, seed in world.gateway.asked] == [request_seed(42, 0, 3, call, 0, 0) for call in calls]
    took = world.costs.take()
    assert took["orch/tokens"] == 2 * LENGTH
    assert took["orch/generate_node_s"] == took["orch/generate_s"] > 0  # one machine made them


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/store")
    source = tmp_path / "source"
    source.mkdir()
    catalog, blobs = Catalog(store, "test"), {}
    for version in (PolicyVersion(0, 10), PolicyVersion(0, 20), PolicyVersion(0, 30), PolicyVersion(1, 40)):
        (source / "model.safetensors").write_bytes(b"weights of %d" % version.step)
        stored = transfer.upload(store, catalog, files_below(source), version, 0.0, {})
        blobs[version.step] = f"{layout.BLOBS}/{transfer.read_manifest(store, stored).files[0].chunks[0]}"
    store.put(blobs[30], b"weights of 31")
    store.delete([blobs[20]])
    restored = restore_newest(store, (0,), tmp_path / "restored", None)
    assert restored is not None
    assert restored.at == PolicyVersion(0, 10)
    assert (restored.folder / "model.safetensors").read_bytes() == b"weights of 10"
    assert restored.folder.name == "checkpoint-10"
    assert restored.base_model is None
    assert restore_newest(store, (2,), tmp_path / "restored", None) is None
    # What is damaged is stored anew when the trainer comes by that step again.
    (source / "model.safetensors").write_bytes(b"weights of 30")
    transfer.upload(store, catalog, files_below(source), PolicyVersion(0, 30), 0.0, {})
    healed = restore_newest(store, (0,), tmp_path / "restored", None)
    assert healed is not None
    assert healed.at == PolicyVersion(0, 30)


def test_a_refused_prompt_is_told_with_its_numbers_and_the_call_goes_on(world: World) -> None:
    world.gateway.open()
    world.gateway.refuses = lambda prompt: len(prompt) > 2
    version, prompts = PolicyVersion(0, 3), [[5, 6], [7, 8, 9], [4, 4]]
    ref = PolicyRef(str(version), layout.policy(version, (0, 1, 1)))
    for _ in range(2):  # the second is from the journal
        got = world.source().complete(version, prompts, 2, SAMPLING, training=True, policies=lambda _: ref)
        assert [len(one.token_ids) for one in got.completions] == [LENGTH, LENGTH, 0, 0, LENGTH, LENGTH]
    world.gateway.close()
    told = {name: value for name, value in world.costs.take().items() if "refused" in name}
    assert told == {
        metrics.PROMPTS_REFUSED: 2,
        metrics.REFUSED_ROW: 107,
        metrics.REFUSED_TOKENS: 3,
        metrics.REFUSED_LIMIT: 9,
    }
    assert metrics.PROMPTS_REFUSED not in world.costs.take()


def test_where_a_refused_prompt_fails_the_run_it_is_named_and_asked_for_again_later(world: World) -> None:
    world.gateway.open()
    world.gateway.refuses, world.rule = (lambda prompt: len(prompt) > 2), "fail"
    version, ref = PolicyVersion(0, 3), PolicyRef("0-3", "policies")
    call = ([[5, 6], [7, 8, 9]], 1, SAMPLING)
    with pytest.raises(BadPrompts, match="row 107 of the dataset has 3 tokens, and the nodes take sequences of 9"):
        world.source().complete(version, *call, training=True, policies=lambda _: ref)
    world.gateway.refuses = lambda _: False  # rollout.vllm.max-model-len was raised
    got = world.source().complete(version, *call, training=True, policies=lambda _: ref)
    world.gateway.close()
    assert not any(one.refused for one in got.completions)


def test_a_fleet_that_takes_nothing_is_not_the_prompts_fault(world: World) -> None:
    world.gateway.open()
    world.gateway.refuses = lambda prompt: prompt[0] != 1
    source, version, ref = world.source(), PolicyVersion(0, 3), PolicyRef("0-3", "policies")

    def ask(*prompts: list[int]) -> None:
        source.complete(version, list(prompts), 1, SAMPLING, training=True, policies=lambda _: ref)

    bad = [[2]] * (NONE_TAKEN - 1)
    ask(*bad)
    ask([1], *bad, [2])
    ask(*bad)
    with pytest.raises(BadPrompts, match=f"no node takes any prompt, {NONE_TAKEN} in a row"):
        ask([2])
    world.gateway.close()
