"""The parts of a rollout node that need no vLLM: its command line, and that its processes end together."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from policies.spec import Dataset, RolloutSpec, RunSpec, TrainerSpec
from tasks.node_env import NotANode, read_node_env
from tasks.vllm_server import Server, Unfit, argv_of, flags_of, light_env
from tests.gateway_rig import until

# A program that starts a grandchild which ignores SIGTERM, as a hung engine would, and tells both pids.
TREE = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"],
    stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
time.sleep(float(sys.argv[2]))
sys.exit(7)
"""


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def leash(folder: Path, lives_s: float) -> tuple[subprocess.Popen[bytes], list[int]]:
    pids = folder / "pids"
    process = subprocess.Popen(
        [sys.executable, "-m", "tasks.leash", sys.executable, "-c", TREE, str(pids), str(lives_s)]
    )
    until("the tree", lambda: pids.exists() and len(pids.read_text().split()) == 2)
    return process, [int(pid) for pid in pids.read_text().split()]


def test_what_a_program_started_ends_after_it_and_its_exit_code_is_kept(tmp_path: Path) -> None:
    process, pids = leash(tmp_path, lives_s=0.0)
    assert process.wait(timeout=20) == 7
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("victim", ["leash", "program"])
def test_the_whole_tree_ends_when_either_is_told_or_killed(tmp_path: Path, victim: str) -> None:
    process, pids = leash(tmp_path, lives_s=600.0)
    if victim == "leash":
        process.terminate()
    else:
        subprocess.run(["kill", "-9", str(pids[0])], check=True)
    assert process.wait(timeout=20) == {"leash": 128 + signal.SIGTERM, "program": 128 + signal.SIGKILL}[victim]
    assert not any(alive(pid) for pid in pids)


def test_the_tree_ends_when_the_one_who_started_the_leash_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    starter = (
        "import signal, sys, os; from tasks.children import start_child; "
        "start_child([sys.executable, '-m', 'tasks.leash', sys.executable, '-c', *sys.argv[1:]],"
        " dict(os.environ), death_signal=signal.SIGTERM).wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", starter, TREE, str(pids), "600"])
    until("the tree", lambda: pids.exists() and len(pids.read_text().split()) == 2)
    process.kill()
    process.wait()
    until("the end of the tree", lambda: not any(alive(int(pid)) for pid in pids.read_text().split()))


def test_flags_are_written_as_vllm_reads_them() -> None:
    flags = {"a": True, "b": False, "c": None, "d": 3, "e": ["x", "y"], "f": {"k": 1}, "g": 0.5}
    assert flags_of(flags) == [
        *("--a", "--no-b", "--d", "3", "--e", "x", "y", "--f", '{"k": 1}', "--g", "0.5"),
    ]


def spec_of(workdir: Path, flags: dict[str, Any], env: dict[str, str] | None = None) -> RunSpec:
    return RunSpec(
        name="t",
        storage="memory://t",
        trainer=TrainerSpec(model="model", dataset=Dataset(path="json"), reward_funcs=()),
        grpo={},
        workdir=str(workdir),
        rollout=RolloutSpec(vllm=flags, env=env or {}),
    )


def test_run_yaml_decides_on_flags_except_those_that_the_run_depends_on(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    flags = {"stream_interval": 2, "logprobs-mode": "raw_logprobs", "middleware": "mine.Open"}
    argv = argv_of(spec_of(tmp_path, flags), "127.0.0.1", 1234, None)
    given = dict(zip(argv, [*argv[1:], ""], strict=True))
    assert given["--stream-interval"] == "2"
    assert given["--logprobs-mode"] == "processed_logprobs"
    assert given["--middleware"] == "tasks.vllm_guard.Guard"
    assert given["--model"] == str(tmp_path / "model")
    assert (given["--host"], given["--port"]) == ("127.0.0.1", "1234")
    assert "raw_logprobs" not in argv
    assert "mine.Open" not in argv


@pytest.mark.parametrize(
    ("flags", "env", "spares_the_worker", "spares_compiling"),
    [
        ({}, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, True, False),
        ({"enforce_eager": True}, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, True, True),
        ({"enforce-eager": True}, {}, False, False),
        ({"enforce-eager": True}, {"VLLM_CPU_OMP_THREADS_BIND": "0-7"}, False, False),
        ({"tensor_parallel_size": 2}, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, False, False),
        ({"tensor-parallel-size": 1}, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, True, False),
    ],
)
def test_vllm_on_a_cpu_starts_no_more_than_it_needs(
    flags: dict[str, Any], env: dict[str, str], spares_the_worker: bool, spares_compiling: bool, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, flags, env)
    assert ("--distributed-executor-backend" in argv_of(spec, "127.0.0.1", 1, None)) is spares_the_worker
    assert light_env(spec) == ({"TORCHDYNAMO_DISABLE": "1"} if spares_compiling else {})


@dataclass
class FakeSampler:
    """A vLLM that draws by seed and, unless it is `forgetful`, by position. At each of the first `ties`
    seeds it draws once otherwise, as rounding may."""

    forgetful: bool = False
    ties: int = 0
    refusal: str = ""
    asked: list[int] = field(default_factory=list)  # the seeds of its completions

    async def completion(self, request: web.Request) -> web.Response:
        body = await request.json()
        begun = len(body["prompt"])
        start = 0 if self.forgetful else begun
        tokens = [hash((body["seed"], start + i)) % 1000 for i in range(body["max_tokens"])]
        if begun > 2 and body["seed"] < self.ties:
            tokens[0] += 1
        self.asked.append(body["seed"])
        return web.json_response({"choices": [{"token_ids": tokens}]})

    async def install(self, _: web.Request) -> web.Response:
        return web.Response(text=self.refusal)

    async def tried(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self.completion)
        app.router.add_put("/grpo/sampling", self.install)
        async with TestServer(app) as server, ClientSession() as http:
            url = str(server.make_url("")).rstrip("/")
            no_process = cast("subprocess.Popen[bytes]", None)
            await Server("boot", "", url, no_process, "secret", http).sample_by_position()


@pytest.mark.parametrize(("ties", "seeds"), [(0, {0}), (2, {0, 1, 2})])
def test_a_vllm_that_goes_on_as_it_would_have_is_fit(ties: int, seeds: set[int]) -> None:
    vllm = FakeSampler(ties=ties)
    asyncio.run(vllm.tried())
    assert set(vllm.asked) == seeds


@pytest.mark.parametrize(
    ("vllm", "why"),
    [
        (FakeSampler(forgetful=True), "3 completions that were cut went on otherwise"),
        (FakeSampler(ties=3), "3 completions that were cut went on otherwise"),
        (FakeSampler(refusal="with speculative decoding"), "with speculative decoding"),
    ],
)
def test_a_vllm_that_goes_on_otherwise_is_not_let_in(vllm: FakeSampler, why: str) -> None:
    with pytest.raises(Unfit, match=why):
        asyncio.run(vllm.tried())


def test_a_node_names_the_variable_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUN", "NODE", "TOKEN", "WORKDIR"):
        monkeypatch.setenv(f"GRPO_ORCH_{name}", "x")
    monkeypatch.delenv("GRPO_ORCH_ATTEMPT", raising=False)
    with pytest.raises(NotANode, match="GRPO_ORCH_ATTEMPT is not set"):
        read_node_env()
