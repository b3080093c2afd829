"""The gateway's members as an operator sees and moves them: over HTTP and from the command line."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import structlog

from grpo_orch.checkpoint.records import documents
from grpo_orch.orchestrator.home import run_dir
from grpo_orch.policies.serving.gateway_status import MembershipChange, MemberStatus, State, describe
from grpo_orch.policies.serving.joining import BASE_MODEL, ENGINE, POLICY, JoiningNode, Stage
from grpo_orch.policies.serving.wire import CHAT, Announce, AnnounceReply, BatchLine
from grpo_orch.tasks.completions.gateway_client import body_of
from tests.rigs.command_line import Cli
from tests.rigs.gateway_process import TOKEN, Rig, make_batch
from tests.rigs.gateway_world import World
from tests.stand_ins.fake_vllm import FOREVER, completion, prompt_of
from tests.stand_ins.world import spec

MESSAGES = [{"role": "user", "content": "hello"}]


async def test_members_are_listed_with_their_state_and_why(world: World) -> None:
    await world.node("a"), await world.node("b")
    await world.node("old", policy="0-9")
    listed = (await world.http.get("/members")).json()
    assert listed["policy"] == "0-0"
    found = {one["node"]: (one["state"], one["policy"]) for one in listed["members"]}
    assert found == {"a": ("serving", "0-0"), "b": ("serving", "0-0"), "old": ("behind", "0-9")}
    assert listed["members"][0]["reason"] == "joined as boot boot-of-a, holds 0-0"


async def test_stage_of_joining_node_is_shown_until_membership(world: World) -> None:
    stage = Stage(BASE_MODEL, 52_000_000_000, 141_000_000_000)
    answer = await world.http.post("/joining/a", content=msgspec.json.encode(stage))
    assert msgspec.json.decode(answer.content, type=AnnounceReply) == AnnounceReply(world.members.wanted)
    [coming] = world.gateway.status().joining
    assert (coming.node, coming.stage) == ("a", stage)
    assert coming.stalled_s >= 0.0
    told = Announce("b", "h:1", None, stage=Stage(POLICY, 1, 2))
    await world.http.post("/members/a", content=msgspec.json.encode(told))
    status = world.gateway.status()
    assert (status.joining, status.members[0].stage) == ([], Stage(POLICY, 1, 2))
    for wrong in (Stage("a\nb"), Stage("x" * 1001), Stage("x", -1), Stage("x", 0, 2**63)):
        refused = await world.http.post("/joining/a", content=msgspec.json.encode(wrong))
        assert refused.status_code == 400, wrong


async def test_machine_with_a_joined_engine_restarts_its_stage(world: World) -> None:
    joining_nodes, stage = world.members.joining_nodes, Stage(ENGINE, 0, 141)
    joining_nodes.update("rollout-0-i1", stage, time.monotonic() - 6 * 3600.0)
    told = Announce("b", "h:1", None, engines=2, stage=Stage(POLICY, 1, 2))
    await world.http.post("/members/rollout-0-i1.0", content=msgspec.json.encode(told))
    assert world.gateway.status().joining == []
    world.members.leave("rollout-0-i1.0", "b")
    joining_nodes.forget("rollout-0-i1.0")
    joining_nodes.update("rollout-0-i1", stage, time.monotonic())
    [coming] = world.gateway.status().joining
    assert (coming.node, coming.stalled_s < 3600.0) == ("rollout-0-i1", True)


class Going:
    """In the place of the nodes that come: one gets on whenever somebody looks, until it stands still."""

    def __init__(self) -> None:
        self.still, self._moves = False, 0

    @property
    def moves(self) -> int:
        self._moves += not self.still
        return self._moves

    def status(self, *_: object) -> list[JoiningNode]:
        return []


async def test_batch_is_not_abandoned_while_a_node_makes_progress(world: World) -> None:
    """Its deadline is over at once; it waits for six words of progress, and then for none."""
    going = Going()
    world.members.joining_nodes = cast("Any", going)
    body = body_of(make_batch("0-0", requests=2, deadline_s=1e-6))
    seen, last = 0, ""
    async with world.http.stream("POST", "/v1/rollouts", content=body) as answer:
        async for line in answer.aiter_lines():
            told = msgspec.json.decode(line, type=BatchLine)
            seen += told.progress is not None
            going.still = seen >= 6
            last = told.error or ""
    assert seen >= 6
    assert "no node served policy 0-0" in last


async def test_every_change_is_remembered_with_its_reason(world: World) -> None:
    await world.node("a")
    world.members.drain("a")
    world.members.remove("a")
    await world.node("b", policy="0-4")
    changes = (await world.http.get("/events")).json()["changes"]
    assert [one["reason"] for one in changes] == [
        "a: joined as boot boot-of-a, holds 0-0",
        "a: drains, 0 requests running",
        "a: removed",
        "b: joined as boot boot-of-b, holds 0-4",
    ]
    assert [one["seq"] for one in changes] == [1, 2, 3, 4]
    assert all(a["at_s"] <= b["at_s"] for a, b in pairwise(changes))


async def test_drained_member_finishes_its_requests_and_leaves(world: World) -> None:
    await world.node("other", policy="0-9")  # parses the answer
    a = await world.node("a", stalls=9)
    asking = asyncio.ensure_future(world.http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 16}))
    await world.until(lambda: a.stalled)
    assert (await world.http.post("/members/a/drain")).status_code == 204
    _, listed = (await world.http.get("/members")).json()["members"]
    assert (listed["state"], listed["requests_running"]) == ("draining", 1)
    a.change(stalls=FOREVER)
    assert (await asking).status_code == 200
    await world.until(a.announcing.done)
    assert [one["node"] for one in (await world.http.get("/members")).json()["members"]] == ["other"]


async def test_removed_member_leaves_at_once_and_its_request_moves(world: World) -> None:
    body = {"messages": MESSAGES, "seed": 1, "max_tokens": 20, "return_token_ids": True}
    tokens, _, reason = completion(body, prompt_of(body))
    a = await world.node("a", stalls=9)
    asking = asyncio.ensure_future(world.http.post(CHAT, json=body))
    await world.until(lambda: a.stalled)
    await world.node("b")
    assert (await world.http.delete("/members/a")).status_code == 204
    listed = (await world.http.get("/members")).json()["members"]
    assert [one["node"] for one in listed] == ["b"]
    [choice] = (await asking).json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (tokens, reason)
    await world.until(lambda: a.aborted == 1)
    await world.until(a.announcing.done)  # it was told that this boot is over
    again = await world.members.announce("a", Announce("boot-of-a", "127.0.0.1:9", "0-0"))
    assert again.drain
    assert (await world.http.delete("/members/a")).status_code == 404


async def test_agents_leave_names_its_boot(world: World) -> None:
    await world.node("a")
    assert (await world.http.delete("/members/a", params={"boot": "another"})).status_code == 204
    assert world.members.table.member("a") is not None
    assert (await world.http.delete("/members/a", params={"boot": "boot-of-a"})).status_code == 204
    assert world.members.table.member("a") is None


@pytest.mark.parametrize(
    ("policy", "serving", "draining", "unfit", "wanted", "state"),
    [
        ("0-1", True, False, "", "0-1", State.SERVING),
        ("0-1", False, False, "", "0-1", State.SUSPECTED),
        ("0-1", False, True, "", "0-1", State.DRAINING),
        ("0-0", False, False, "", "0-1", State.BEHIND),
        (None, False, False, "", "0-1", State.BEHIND),
        (None, False, True, "", "0-1", State.DRAINING),
        (None, False, False, "", None, State.BEHIND),  # before anything is wanted
        (None, False, False, "policy 0-1: disk full", "0-1", State.UNFIT),
        ("0-1", True, False, "policy 0-1: disk full", "0-1", State.SERVING),
    ],
)
def test_states(
    policy: str | None, serving: bool, draining: bool, unfit: str, wanted: str | None, state: State
) -> None:
    member = MemberStatus("a", "b", "h:1", policy, serving, draining, 0, 0.0, unfit=unfit)
    (told,) = describe([member], [MembershipChange(1, 0.0, "a: holds 0-0, before: base weights")], wanted)
    assert (told.state, told.unfit) == (state, unfit)
    assert not unfit or told.reason == f"unfit: {unfit}"


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path / "home"))
    rig = Rig(tmp_path)
    documents.create_run(rig.store, documents.RunRecord(documents.SCHEMA, "run-1", time.time(), spec()))
    (run_dir("run-1") / "token").write_text(TOKEN)
    try:
        yield rig
    finally:
        rig.stop()
        structlog.reset_defaults()


@pytest.fixture
def cli(rig: Rig, grpo_orch: Cli) -> Cli:
    """`grpo-orch members ...` of the rig's run."""
    return lambda *words: grpo_orch("members", *words, rig.store.url)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"], ids=["plain", "TLS"])
def test_the_command_line_lists_drains_and_removes(rig: Rig, cli: Cli, host: str) -> None:
    rig.env["GRPO_ORCH_GATEWAY_HOST"] = host
    rig.gateway()
    for name in ("rollout-0", "rollout-1"):
        rig.node(name)
    rig.until_members("rollout-0", "rollout-1")
    code, out, _ = cli("ls")
    assert (code, len(out.splitlines())) == (0, 3)
    assert "rollout-1" in out
    assert {one["node"] for one in json.loads(cli("ls", "-o", "json")[1])} == {"rollout-0", "rollout-1"}
    assert cli("remove", "rollout-0")[:2] == (0, "rollout-0 is removed, 0 requests continue elsewhere\n")
    rig.until_members("rollout-1")
    for command in ("drain", "remove"):
        assert cli(command, "rolout-0") == (2, "", "no member 'rolout-0'; members: rollout-1\n")
    assert json.loads(cli("drain", "rollout-1", "-o", "json")[1]) == {"node": "rollout-1", "state": "draining"}
    rig.until_members()
    assert cli("ls")[1] == "no members\n"
    secret = run_dir("run-1") / "token"
    secret.unlink()
    code, _, complaint = cli("remove", "rollout-0")
    assert (code, complaint.count("\n")) == (1, 1)
    assert "does not have the run's secret" in complaint
    assert not secret.exists(), "none is made"


def test_unreachable_gateway_is_one_line(rig: Rig, cli: Cli) -> None:
    code, _, complaint = cli("drain", "rollout-0")
    assert (code, complaint) == (1, "no gateway yet: the run's trainer starts it\n")
    assert cli("ls")[1] == "the gateway has not written its members yet\n"
    rig.gateway()
    rig.stop()
    code, _, complaint = cli("drain", "rollout-0")
    assert (code, complaint.count("\n")) == (1, 1)
    assert complaint.startswith("the gateway is unreachable from here (http://127.0.0.1:")
