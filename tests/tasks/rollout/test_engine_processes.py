"""A machine that is told of two GPUs: its real agent, a real gateway, and a process tree for each engine.

The GPUs are a stand-in, names that no driver knows, and so is vLLM: `tests/e2e/test_training.py` has real
ones.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.security.vouched import sign_run
from grpo_orch.policies.model.gpus import VISIBLE
from grpo_orch.policies.model.node_contract import ATTEMPT_ENV, NODE_ENV, NOTICE, WORKDIR_ENV
from grpo_orch.policies.serving.gateway_status import MemberStatus
from grpo_orch.policies.serving.wire import Batch, Completion
from grpo_orch.tasks.rollout.vllm.server import BOOT_ENV
from tests.budget import HANG_S, until
from tests.rigs.gateway_process import TOKEN, Rig, make_batch
from tests.rigs.rollout_machine import make_base, publish, spec_of
from tests.stand_ins.fake_vllm import completion

NODE = "rollout-0-i1"
ENGINES = [f"{NODE}.0", f"{NODE}.1"]


class Machine(Rig):
    """A run's data plane with one machine of two engines."""

    def begin(self) -> None:
        self.workdir = self.folder / "work"
        make_base(self.folder)
        plain = spec_of(self.folder)
        spec = replace(plain, storage=self.store.url, rollout=replace(plain.rollout, recovery="exact"))
        documents.create_run(self.store, RunRecord(documents.SCHEMA, "t", 0.0, spec))
        sign_run(self.store, TOKEN)
        self.workdir.mkdir()
        self.env |= {NODE_ENV: NODE, ATTEMPT_ENV: "1", WORKDIR_ENV: str(self.workdir), VISIBLE: "0,1"}
        self.gateway()
        self.agent = self.spawn("-m", "tests.stand_ins.fake_vllm", "agent")

    def serving(self, label: str, but: Container[str] = ()) -> dict[str, MemberStatus] | None:
        """Both engines by name, once both serve that policy, the second in none of those boots."""
        found = {one.node: one for one in self.status().members if one.serving and one.policy == label}
        return found if sorted(found) == ENGINES and found[ENGINES[1]].boot_id not in but else None

    def boots(self) -> dict[str, list[psutil.Process]]:
        """The processes of each boot, by its id."""
        found: dict[str, list[psutil.Process]] = {}
        for one in psutil.process_iter(["environ"]):
            environment = one.info["environ"] or {}
            if environment.get(WORKDIR_ENV) == str(self.workdir) and BOOT_ENV in environment:
                found.setdefault(environment[BOOT_ENV], []).append(one)
        return found


def made(machine: Machine, batch: Batch) -> list[Completion]:
    """The batch's completions, which are those of an undisturbed node."""
    heard = machine.complete(batch)
    assert heard.error is None
    for request, got in zip(batch.requests, heard.completions, strict=True):
        assert (got.token_ids, got.logprobs) == completion(
            {"seed": request.seed, "max_tokens": 128}, request.prompt_token_ids
        )[:2]
    return heard.completions


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    machine.begin()
    yield machine
    for process in machine.processes:
        process.kill()
        process.wait()
    until("no process of the machine left", lambda: not machine.boots())


def test_two_engines_serve_one_dies_and_notice_drains_both(machine: Machine) -> None:
    wanted = publish(machine.store, machine.folder, 0, size_bytes=1000)
    until("both among the members", lambda: sorted(one.node for one in machine.status().members) == ENGINES)
    batch = replace(make_batch("", requests=64, max_tokens=128), policy=wanted)
    assert {one.node for one in made(machine, batch)} == {*ENGINES}
    before = until("both serve", lambda: machine.serving(wanted.label))
    boots = machine.boots()
    told = {boot_id: one[0].environ()[VISIBLE] for boot_id, one in boots.items()}
    assert told == {before[ENGINES[0]].boot_id: "0", before[ENGINES[1]].boot_id: "1"}
    ports = {one.address for one in before.values()}
    assert len(ports) == 2

    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(made, machine, batch)
        whole = [(one.cmdline(), one) for one in boots[before[ENGINES[1]].boot_id]]
        for argv, process in whole:
            if "time.sleep(600)" not in argv[-1]:  # which outlives it, and becomes the agent's
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with its parent
                    process.send_signal(signal.SIGKILL)
        assert len(again.result()) == 64
    after = until("it is back", lambda: machine.serving(wanted.label, but=boots))
    assert after[ENGINES[0]].boot_id == before[ENGINES[0]].boot_id
    until("nothing left of it", lambda: sorted(machine.boots()) == sorted(one.boot_id for one in after.values()))

    (machine.workdir / NOTICE).write_text("120")
    until("both have left", lambda: not machine.status().members)
    assert machine.agent.poll() is None
    machine.agent.send_signal(signal.SIGTERM)
    assert machine.agent.wait(timeout=HANG_S) == 0
    assert not machine.boots()
