"""The gateway's members as an operator sees and moves them: over HTTP and from the command line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import structlog

from checkpoint.records import documents
from orchestrator.gateway.surface.describe import State, describe, state_of
from orchestrator.home import run_dir
from policies.serving.gateway_status import MembershipChange, MemberStatus
from policies.serving.joining import BASE_MODEL, ENGINE, POLICY, Coming, Stage
from policies.serving.wire import Announce, AnnounceReply, BatchLine
from tasks.completions.gateway_client import body_of
from tests.rigs.command_line import Cli
from tests.rigs.gateway_process import TOKEN, Rig, make_batch
from tests.rigs.gateway_served import Served, serve, two_nodes
from tests.stand_ins.fake_vllm import completion
from tests.stand_ins.world import spec


def test_members_are_listed_with_their_state_and_why() -> None:
    async def story(served: Served) -> None:
        await two_nodes(served)
        await served.node("old", policy="0-9")
        listed = (await served.http.get("/members")).json()
        assert listed["policy"] == "0-0"
        found = {one["node"]: (one["state"], one["policy"]) for one in listed["members"]}
        assert found == {"a": ("serving", "0-0"), "b": ("serving", "0-0"), "old": ("behind", "0-9")}
        assert listed["members"][0]["reason"] == "joined as boot boot-of-a, holds 0-0"

    serve(story)


def test_what_a_node_that_comes_is_at_is_told_until_it_is_a_member() -> None:
    async def story(served: Served) -> None:
        stage = Stage(BASE_MODEL, 52_000_000_000, 141_000_000_000)
        answer = await served.http.post("/comers/a", content=msgspec.json.encode(stage))
        assert msgspec.json.decode(answer.content, type=AnnounceReply) == AnnounceReply(served.members.wanted)
        [coming] = served.gateway.status().coming
        assert (coming.node, coming.stage) == ("a", stage)
        assert coming.still_s >= 0.0
        told = Announce("b", "h:1", None, stage=Stage(POLICY, 1, 2))
        await served.http.post("/members/a", content=msgspec.json.encode(told))
        status = served.gateway.status()
        assert (status.coming, status.members[0].stage) == ([], Stage(POLICY, 1, 2))
        for wrong in (Stage("a\nb"), Stage("x" * 1001), Stage("x", -1), Stage("x", 0, 2**63)):
            refused = await served.http.post("/comers/a", content=msgspec.json.encode(wrong))
            assert refused.status_code == 400, wrong

    serve(story)


def test_a_machine_of_which_an_engine_joins_begins_anew_when_it_has_to_come_again() -> None:
    async def story(served: Served) -> None:
        comers, stage = served.members.comers, Stage(ENGINE, 0, 141)
        comers.tell("rollout-0-i1", stage, time.monotonic() - 6 * 3600.0)
        told = Announce("b", "h:1", None, engines=2, stage=Stage(POLICY, 1, 2))
        await served.http.post("/members/rollout-0-i1.0", content=msgspec.json.encode(told))
        assert served.gateway.status().coming == []
        served.members.leave("rollout-0-i1.0", "b")
        comers.forget("rollout-0-i1.0")
        comers.tell("rollout-0-i1", stage, time.monotonic())
        [coming] = served.gateway.status().coming
        assert (coming.node, coming.still_s < 3600.0) == ("rollout-0-i1", True)

    serve(story)


class Going:
    """In the place of the nodes that come: one gets on whenever somebody looks, until it stands still."""

    def __init__(self) -> None:
        self.still, self._moves = False, 0

    @property
    def moves(self) -> int:
        self._moves += not self.still
        return self._moves

    def status(self, *_: object) -> list[Coming]:
        return []


def test_a_batch_is_not_given_up_while_a_node_gets_on() -> None:
    """Its deadline is over at once; it waits for six words of progress, and then for none."""

    async def story(served: Served) -> None:
        going = Going()
        served.members.comers = cast("Any", going)
        body = body_of(make_batch("0-0", requests=2, deadline_s=1e-6))
        seen, last = 0, ""
        async with served.http.stream("POST", "/v1/rollouts", content=body) as answer:
            async for line in answer.aiter_lines():
                told = msgspec.json.decode(line, type=BatchLine)
                seen += told.progress is not None
                going.still = seen >= 6
                last = told.error or ""
        assert seen >= 6
        assert "no node could serve policy 0-0" in last

    serve(story)


def test_events_are_the_changes_with_their_reasons_in_order() -> None:
    async def story(served: Served) -> None:
        await served.node("a")
        await served.http.delete("/members/a")
        changes = (await served.http.get("/events")).json()["changes"]
        assert [one["seq"] for one in changes] == list(range(1, len(changes) + 1))
        assert [one["reason"] for one in changes] == ["a: joined as boot boot-of-a, holds 0-0", "a: removed"]
        assert changes[0]["at_s"] <= changes[1]["at_s"]

    serve(story)


def test_a_drained_member_finishes_what_it_has_and_leaves() -> None:
    async def story(served: Served) -> None:
        a = await served.node("a")
        a.change(stalls=9)
        body = {"prompt": [1, 2], "seed": 1, "max_tokens": 20}
        async with served.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            assert response.status_code == 200
            assert (await served.http.post("/members/a/drain")).status_code == 204
            [listed] = (await served.http.get("/members")).json()["members"]
            assert (listed["state"], listed["requests_running"]) == ("draining", 1)
            a.change(stalls=1_000_000)
            assert b"[DONE]" in await response.aread()
        await served.until(a.announcing.done)
        assert (await served.http.get("/members")).json()["members"] == []

    serve(story)


def test_a_removed_member_is_out_at_once_its_boot_void_and_its_request_goes_on_elsewhere() -> None:
    tokens, _, reason = completion({"seed": 1, "max_tokens": 20}, [1, 2])

    async def story(served: Served) -> None:
        a = await served.node("a")
        a.change(stalls=9)
        body = {"prompt": [1, 2], "seed": 1, "max_tokens": 20, "return_token_ids": True, "stream": True}
        async with served.http.stream("POST", "/v1/completions", json=body) as response:
            await served.node("b")
            assert (await served.http.delete("/members/a")).status_code == 204
            listed = (await served.http.get("/members")).json()["members"]
            assert [one["node"] for one in listed] == ["b"]
            events = [json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: {")]
        choices = [event["choices"][0] for event in events]
        assert [token for choice in choices for token in choice["token_ids"]] == tokens
        assert choices[-1]["finish_reason"] == reason
        await served.until(lambda: a.aborted == 1)
        await served.until(a.announcing.done)  # it was told that this boot is over
        again = await served.members.announce("a", Announce("boot-of-a", "127.0.0.1:9", "0-0"))
        assert again.drain
        assert (await served.http.delete("/members/a")).status_code == 404

    serve(story)


def test_an_agents_own_leave_names_its_boot() -> None:
    async def story(served: Served) -> None:
        await served.node("a")
        assert (await served.http.delete("/members/a", params={"boot": "another"})).status_code == 204
        assert served.members.row("a") is not None
        assert (await served.http.delete("/members/a", params={"boot": "boot-of-a"})).status_code == 204
        assert served.members.row("a") is None

    serve(story)


@pytest.mark.parametrize(
    ("policy", "serving", "draining", "state"),
    [
        ("0-1", True, False, State.SERVING),
        ("0-1", False, False, State.IN_DOUBT),
        ("0-1", False, True, State.DRAINING),
        ("0-0", False, False, State.BEHIND),
        (None, False, False, State.BEHIND),
        (None, False, True, State.DRAINING),
    ],
)
def test_states(policy: str | None, serving: bool, draining: bool, state: State) -> None:
    assert state_of(MemberStatus("a", "b", "h:1", policy, serving, draining, 0, 0.0), "0-1") is state


@pytest.mark.parametrize(
    ("policy", "serving", "state"), [(None, False, State.UNFIT), ("0-1", True, State.SERVING)]
)
def test_who_cannot_load_what_is_wanted_is_unfit_and_says_why(
    policy: str | None, serving: bool, state: State
) -> None:
    member = MemberStatus("a", "b", "h:1", policy, serving, False, 0, 0.0, unfit="policy 0-1: disk full")
    (told,) = describe([member], [MembershipChange(1, 0.0, "a: holds 0-0, before: base weights")], "0-1")
    assert (told.state, told.reason, told.unfit) == (
        state,
        "unfit: policy 0-1: disk full",
        "policy 0-1: disk full",
    )


def test_before_anything_is_wanted_nobody_is_in_doubt() -> None:
    assert state_of(MemberStatus("a", "b", "h:1", None, False, False, 0, 0.0), None) is State.BEHIND


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
    assert cli("remove", "rollout-0")[:2] == (0, "rollout-0 is out, 0 requests go on elsewhere\n")
    rig.until_members("rollout-1")
    assert json.loads(cli("drain", "rollout-1", "-o", "json")[1]) == {"node": "rollout-1", "state": "draining"}
    rig.until_members()
    assert cli("ls")[1] == "no member\n"


def test_a_node_that_is_no_member_is_a_mistake_in_one_line(rig: Rig, cli: Cli) -> None:
    rig.gateway()
    rig.node("rollout-0")
    rig.until_members("rollout-0")
    for command in ("drain", "remove"):
        assert cli(command, "rolout-0") == (2, "", "no member 'rolout-0'; there are: rollout-0\n")


def test_a_gateway_out_of_reach_is_one_line(rig: Rig, cli: Cli) -> None:
    code, _, complaint = cli("drain", "rollout-0")
    assert (code, complaint) == (1, "no gateway yet: the run's trainer starts it\n")
    assert cli("ls")[1] == "no gateway has written its members yet\n"
    rig.gateway()
    rig.stop()
    code, _, complaint = cli("drain", "rollout-0")
    assert (code, complaint.count("\n")) == (1, 1)
    assert complaint.startswith("the gateway cannot be reached from here (http://127.0.0.1:")


def test_without_the_runs_secret_nothing_is_asked_and_none_is_made(rig: Rig, cli: Cli) -> None:
    rig.gateway()
    secret = run_dir("run-1") / "token"
    secret.unlink()
    code, _, complaint = cli("remove", "rollout-0")
    assert (code, complaint.count("\n")) == (1, 1)
    assert "does not have the run's secret" in complaint
    assert not secret.exists()
