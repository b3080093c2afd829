"""A real rollout node: agent, vLLM on CPU and gateway, each a process, on a tiny model made on the spot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import httpx
import pytest

from grpo_orch.checkpoint.security import identity
from grpo_orch.checkpoint.stream import manifest
from grpo_orch.policies.serving.wire import CHAT, COMPLETIONS, RENDER, Completion, PolicyRef
from tests.budget import HANG_S, until
from tests.node.rollout.engines import HOST, TOKEN, Lab, completions, largest_difference
from tests.stand_ins.strangers import check_closed

MANY = 4096  # completions, so many that they cannot end before what is done meanwhile, however slowly
LOST = 8  # of the 128 that vLLM makes at a time
LONG_TOKENS = 250
CLOSE = 1e-5  # of log-probabilities: an engine computes other last bits in a batch of another shape


def check_same(again: list[Completion], first: list[Completion]) -> None:
    assert [replace(one, logprobs=[]) for one in again] == [replace(one, logprobs=[]) for one in first]
    for one, other in zip(again, first, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, rel=0.0, abs=CLOSE)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.stop()


def test_a_node_serves_each_published_policy_exactly(lab: Lab) -> None:
    member = until("the node among the members", lab.member)
    assert (member.node, member.policy, member.serving) == ("rollout-0-i1", None, False)
    first = completions(list(lab.ask(lab.publish("0-0", seed=1))))
    assert len(first) == 16
    assert largest_difference(lab.models["0-0"], first) < 1e-5
    again = lab.ask(PolicyRef("0-0", "policies/0000/00000000"), min_p=0.0)  # to the gateway another request
    check_same(completions(list(again)), first)
    second = completions(list(lab.ask(lab.publish("0-1", seed=2), temperature=0.7)))
    assert {one.policy for one in second} == {"0-1"}
    assert largest_difference(lab.models["0-1"], second, temperature=0.7) < 1e-5
    assert largest_difference(lab.models["0-0"], second, temperature=0.7) > 0.1
    kept = until(
        "one policy's files", lambda: len(found := list((lab.workdir / "policies").iterdir())) == 1 and found
    )
    assert kept[0].name == "0-1"


def test_nodes_port_admits_only_the_run(lab: Lab) -> None:
    member = until("a member", lab.member)
    check_closed(HOST, int(member.address.rpartition(":")[2]), TOKEN)
    node = f"https://{member.address}"
    http = httpx.Client(verify=identity.client_context(TOKEN), timeout=HANG_S)
    body = {"model": "policy", "prompt": [5], "max_tokens": 1}
    right = {
        "Authorization": f"Bearer {TOKEN}",
        "X-Grpo-Boot": member.boot_id,
        "X-Grpo-Policy": "0-1",
    }
    chat = {"model": "policy", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 1}
    for path, asked in ((COMPLETIONS, body), (RENDER, chat)):
        assert http.post(f"{node}{path}", json=asked, headers=right).status_code == 200
        for name, value, status in (
            ("Authorization", "Bearer wrong", 401),
            ("X-Grpo-Boot", "another", 409),
            ("X-Grpo-Policy", "0-0", 409 if path == COMPLETIONS else 200),  # no weights take part in the other
        ):
            answer = http.post(f"{node}{path}", json=asked, headers={**right, name: value})
            assert answer.status_code == status
    assert http.post(f"{node}{CHAT}", json=chat, headers=right).status_code == 404
    assert http.get(f"{node}/health").status_code == 401
    assert http.get(f"{node}/metrics").status_code == 401
    assert "vllm:num_requests_running" in http.get(f"{node}/metrics", headers=right).text
    assert member.max_requests == 128  # vLLM's own default on a CPU
    assert member.kv_tokens > 256

    def idle() -> bool:  # the last word may be from when the test before this one had requests at work
        word = one.engine if (one := lab.member()) else None
        return word is not None and (word.running, word.waiting) == (0, 0) and word.tokens > 0

    until("an idle engine's word", idle)
    load = {"version": "0-9", "path": "/nowhere"}
    assert http.put(f"{node}/grpo/policy", json=load).status_code == 401
    assert http.put(f"{node}/grpo/policy", json=load, headers=right).status_code == 404
    for method, path in (
        ("POST", "/collective_rpc"),
        ("POST", "/pause"),
        ("GET", "/v1/models"),
        ("PUT", "/grpo/sampling"),
        ("GET", "/docs"),
    ):
        assert http.request(method, f"{node}{path}", headers=right).status_code == 404
    assert http.post(f"{node}/v1/completions", json=body, headers=right).status_code == 200
    http.close()


def test_damaged_policy_is_refused_and_repaired_one_served(lab: Lab) -> None:
    policy = lab.publish("0-3", seed=4)
    boot_id = until("a member", lab.member).boot_id
    files = manifest.load(lab.store, policy.prefix).files
    weights = next(f"{policy.prefix}/{file.chunks[0]}" for file in files if file.name == "model.safetensors")
    good = lab.store.get(weights)
    lab.store.put(weights, good[:-1] + bytes([good[-1] ^ 1]))
    lines = list(lab.ask(policy, deadline_s=3.0))
    assert lines[-1].error is not None
    assert not any(line.completion for line in lines)
    lab.store.put(weights, good)
    made = completions(list(lab.ask(policy)))
    assert largest_difference(lab.models["0-3"], made) < 1e-5
    assert until("a member", lab.member).boot_id == boot_id  # vLLM never saw the damaged file


def test_policy_lacking_a_tensor_is_skipped_for_the_next(lab: Lab) -> None:
    until("a member", lab.member)
    completions(list(lab.ask(lab.publish("0-4", seed=4))))  # a first policy that lacks one costs a start
    boot_id = until("a member", lab.member).boot_id
    policy = lab.publish("0-5", seed=5, lacking="model.layers.1.mlp.down_proj.weight")
    lines = list(lab.ask(policy, deadline_s=3.0))
    assert lines[-1].error is not None
    assert not any(line.completion for line in lines)
    made = completions(list(lab.ask(lab.publish("0-6", seed=6))))
    assert largest_difference(lab.models["0-6"], made) < 1e-5
    assert until("a member", lab.member).boot_id == boot_id  # vLLM never saw it


def test_killed_vllm_serves_again_only_with_the_policy(lab: Lab) -> None:
    policy = lab.publish("0-7", seed=7)
    completions(list(lab.ask(policy)))
    before = until("a member", lab.member)
    old = lab.processes()
    # In the middle of completions: they are what they are on one that is not killed.
    long: dict[str, Any] = {"max_tokens": LONG_TOKENS, "ignore_eos": True}
    lines = lab.ask(policy, range(MANY), **long)
    # So many tokens that LOST completions cannot be all that have begun, however slowly vLLM admits them.
    next(line for line in lines if line.progress and line.progress.tokens > LOST * LONG_TOKENS)
    lab.kill_vllm()
    lost = (one for line in lines if (one := line.completion) and any(part.tokens for part in one.handed_over))
    made = {one.index: replace(one, handed_over=[]) for one in islice(lost, LOST)}
    lines.close()
    assert len(made) == LOST
    completions(list(lab.ask(lab.publish("1-0", seed=8))))  # so nobody will request the rest of the batch again
    again = list(lab.ask(policy, made, **long, min_p=0.0))  # the same, and to the gateway another request
    check_same(completions(again), [made[index] for index in sorted(made)])
    until("its next boot", lambda: (one := lab.member()) is not None and one.boot_id != before.boot_id)
    left = {pid: line for pid, line in lab.processes().items() if pid in old and pid != lab.agent.pid}
    assert left == {}  # the engine and its workers went with the server


def test_notice_removes_node_and_its_end_leaves_nothing(lab: Lab) -> None:
    (lab.workdir / "notice").touch()
    until("no member", lambda: lab.member() is None)
    assert lab.agent.poll() is None
    assert len(lab.processes()) > 3
    lab.agent.kill()
    lab.agent.wait()
    until("no process of the node left", lambda: not lab.processes())
    (lab.workdir / "notice").unlink()


def test_sigterm_ends_the_agent_in_good_order_while_vllm_starts(lab: Lab) -> None:
    agent = lab.start("grpo_orch.tasks.rollout.agent")
    until(
        "vLLM's process",
        lambda: any("grpo_orch.tasks.rollout.vllm.api_server" in line for line in lab.processes().values()),
    )
    agent.terminate()
    assert agent.wait(HANG_S) == 0
    assert lab.processes() == {}
