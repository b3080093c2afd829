"""A batch whose asker can do without nodes: once none is there, it is told what there is and goes on by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest

from orchestrator.gateway.routing.members import Members
from policies.serving.wire import CUT, SILENT_S, HandOver
from tests.budget import until
from tests.rigs.gateway_process import Rig, check_complete, hear, kill, make_batch
from tests.stand_ins.fake_vllm import completion


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.gateway()
    yield rig
    rig.stop()


def test_nobody_is_there_and_the_batch_ends_at_once(rig: Rig) -> None:
    heard = rig.complete(replace(make_batch("0-0"), patience_s=0.0))
    assert (heard.completions, heard.cut, heard.error) == ([], [], None)
    assert heard.end is not None
    assert (heard.end.members, heard.end.tokens) == (0, 0)


def test_what_a_lost_node_has_made_is_handed_out_and_nothing_counts_as_lost(rig: Rig, tmp_path: Path) -> None:
    node = rig.node("rollout-0", until=tmp_path / "never")  # so that no answer is whole before it is lost
    rig.until_members("rollout-0")
    batch = replace(make_batch("0-0"), patience_s=0.0)
    lines = rig.ask(batch)
    read = [next(line for line in lines if line.progress is not None and line.progress.tokens > 0)]
    kill(node)
    heard = hear(iter([*read, *lines]))
    assert heard.end is not None
    assert heard.cut
    requests = {one.index: one for one in batch.requests}
    for one in heard.cut:
        request = requests[one.index]
        tokens, logprobs, _ = completion({**batch.sampling, "seed": request.seed}, request.prompt_token_ids)
        made = len(one.token_ids)
        assert 0 < made < len(tokens)
        assert (one.token_ids, one.logprobs) == (tokens[:made], logprobs[:made])
        assert (one.finish_reason, one.policy) == (CUT, "0-0")
        assert one.handed_over == [HandOver("rollout-0", made)]
    told = sum(len(one.token_ids) for one in [*heard.completions, *heard.cut])
    assert (heard.end.tokens, heard.end.discarded) == (told, 0)
    assert until("the gateway's word", lambda: rig.status().tokens_delivered == told)
    assert rig.status().tokens_discarded == 0


def test_a_node_that_is_there_and_does_not_hold_the_policy_yet_is_waited_for(rig: Rig) -> None:
    rig.node("rollout-0", never_load=True)
    rig.until_members("rollout-0")
    batch = replace(make_batch("0-1", requests=4), patience_s=0.0)
    lines = rig.ask(batch)
    read = [next(lines) for _ in range(3)]
    assert {line.progress.members for line in read if line.progress is not None} == {0}
    rig.node("rollout-1")
    heard = hear(iter([*read, *lines]))
    check_complete(batch, heard)
    assert heard.cut == []


def test_a_gateway_that_has_just_begun_gives_the_members_of_the_one_before_it_time_to_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    members = Members("secret")
    assert members.anyone()
    now_s[0] += SILENT_S
    assert not members.anyone()


@pytest.mark.parametrize("patience_s", [-1.0, float("nan")])
def test_a_patience_that_is_none_is_refused(rig: Rig, patience_s: float) -> None:
    body = msgspec.json.encode(replace(make_batch("0-0"), patience_s=-1.0))
    if patience_s != patience_s:
        body = body.replace(b'"patience_s":-1.0', b'"patience_s":NaN')
    answer: httpx.Response = rig.http.post(f"{rig.url}/v1/rollouts", content=body)
    assert answer.status_code == 400
