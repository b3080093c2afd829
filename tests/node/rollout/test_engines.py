"""A machine that is told of two GPUs runs two real vLLM engines, each a member, and each with a fate of its own.

The GPUs are a stand-in: names in CUDA_VISIBLE_DEVICES, which vLLM's build for CPUs does not look at.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from policies.model.gpus import VISIBLE
from policies.model.node_contract import NOTICE
from policies.serving.gateway_status import MemberStatus
from tasks.rollout.vllm.server import BOOT_ENV
from tests.budget import until
from tests.node.rollout.test_rollout_node import Lab, completions, largest_difference

ENGINES = ["rollout-0-i1.0", "rollout-0-i1.1"]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path, gpus="0,1")
    yield lab
    lab.stop()


def engines_that_serve(lab: Lab, version: str) -> dict[str, MemberStatus] | None:
    """Both of them by name, once both hold that policy."""
    found = {one.node: one for one in lab.members() if one.policy == version and one.serving}
    return dict(sorted(found.items())) if len(found) == len(ENGINES) else None


def environments(lab: Lab) -> dict[int, dict[str, str]]:
    """Of the processes of the machine's vLLM servers, by pid."""
    found = {}
    for pid in lab.processes():
        try:
            environment = psutil.Process(pid).environ()
        except psutil.Error:  # it has ended
            continue
        if BOOT_ENV in environment:
            found[pid] = environment
    return found


def test_two_engines_serve_one_dies_alone_and_a_notice_drains_both(lab: Lab) -> None:
    until("both among the members", lambda: sorted(one.node for one in lab.members()) == ENGINES)
    policy = lab.publish("0-0", seed=1)
    made = completions(list(lab.ask(policy)))
    assert largest_difference(lab.models["0-0"], made) < 1e-5
    before = until("both serve it", lambda: engines_that_serve(lab, "0-0"))
    assert {one.engines for one in before.values()} == {2}
    assert len({one.address for one in before.values()}) == 2
    assert {one.node for one in completions(list(lab.ask(policy, max_tokens=64)))} == set(ENGINES)
    seen = environments(lab)
    share = {one[BOOT_ENV]: one[VISIBLE] for one in seen.values()}
    assert share == {before[ENGINES[0]].boot_id: "0", before[ENGINES[1]].boot_id: "1"}
    assert len(list((lab.workdir / "policies").glob("[!.]*"))) == 1, "one copy of the policy"

    victims = [pid for pid, one in seen.items() if one[BOOT_ENV] == before[ENGINES[1]].boot_id]
    for pid in victims:  # all of its tree at once: nothing is left to end it in order
        with contextlib.suppress(ProcessLookupError):  # it has ended with its parent
            os.kill(pid, signal.SIGKILL)
    again = completions(list(lab.ask(policy)))
    assert [one.token_ids for one in again] == [one.token_ids for one in made]
    # All may be answered before anybody has noticed that the other one is gone.
    back = lambda: [one.boot_id for one in lab.members() if one.node == ENGINES[1]] != [before[ENGINES[1]].boot_id]  # noqa: E731
    until("its death is seen", back)
    after = until("the other one is back", lambda: engines_that_serve(lab, "0-0"))
    assert after[ENGINES[0]].boot_id == before[ENGINES[0]].boot_id
    assert after[ENGINES[1]].boot_id != before[ENGINES[1]].boot_id

    list(lab.ask(lab.publish("0-1", seed=2)))
    until("both have followed", lambda: engines_that_serve(lab, "0-1"))
    (lab.workdir / NOTICE).write_text("120")
    until("both have left", lambda: not lab.members())
    assert lab.agent.poll() is None
    assert len({one[BOOT_ENV] for one in environments(lab).values()}) == 2, "they wait for the machine's end"
