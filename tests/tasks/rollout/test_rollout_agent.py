"""The parts of a rollout node that need no vLLM: its command line, and that its processes end together."""

from __future__ import annotations

import math
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import ClientSession

from grpo_orch.policies.serving.sampling_check import SamplingCheck, judge
from grpo_orch.tasks.machine.node_env import NodeEnvMissing, read_node_env
from grpo_orch.tasks.rollout.vllm.flags import argv_of, flags_of, uncompiled_env
from grpo_orch.tasks.rollout.vllm.server import Server, Unfit
from tests.budget import HANG_S, until
from tests.rigs.processes import alive
from tests.rigs.rollout_machine import spec_of
from tests.stand_ins.fake_vllm import FakeVllm

VOCABULARY = 300
ENDS_AS_ONE = "grpo_orch.tasks.machine.process_tree"
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

# Ends them as one, and is told so right when it begins to hear no signal any more.
TOLD_WHILE_IT_ENDS = """
import os, signal, sys
from grpo_orch.tasks.machine import process_tree
real, told = signal.signal, []
def set_handler(number, handler):
    if handler is signal.SIG_IGN and not told:
        told.append(number)
        os.kill(os.getpid(), number)
    return real(number, handler)
signal.signal = set_handler
sys.exit(process_tree.main())
"""


def in_a_tree(
    folder: Path, lives_s: float, program: Sequence[str] = ("-m", ENDS_AS_ONE)
) -> tuple[subprocess.Popen[bytes], list[int]]:
    pids = folder / "pids"
    process = subprocess.Popen([sys.executable, *program, sys.executable, "-c", TREE, str(pids), str(lives_s)])
    until("the tree", lambda: pids.exists() and len(pids.read_text().split()) == 2)
    return process, [int(pid) for pid in pids.read_text().split()]


def test_programs_descendants_end_after_it_with_its_exit_code(tmp_path: Path) -> None:
    process, pids = in_a_tree(tmp_path, lives_s=0.0)
    assert process.wait(timeout=HANG_S) == 7
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("victim", ["process_tree", "program"])
def test_whole_tree_ends_when_either_is_stopped_or_killed(tmp_path: Path, victim: str) -> None:
    process, pids = in_a_tree(tmp_path, lives_s=600.0)
    if victim == "process_tree":
        process.terminate()
    else:
        subprocess.run(["kill", "-9", str(pids[0])], check=True)
    assert (
        process.wait(timeout=HANG_S)
        == {"process_tree": 128 + signal.SIGTERM, "program": 128 + signal.SIGKILL}[victim]
    )
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(("lives_s", "code"), [(600.0, 128 + signal.SIGTERM), (0.0, 7)])
def test_whole_tree_ends_on_a_signal_while_it_is_ending(tmp_path: Path, lives_s: float, code: int) -> None:
    """An agent that is killed while it ends its engine: it tells, and at its end the kernel does."""
    process, pids = in_a_tree(tmp_path, lives_s, ["-c", TOLD_WHILE_IT_ENDS])
    if lives_s:
        process.terminate()
    assert process.wait(timeout=HANG_S) == code
    assert not any(alive(pid) for pid in pids)


def test_tree_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    starter = (
        "import signal, sys, os; from grpo_orch.tasks.machine.children import start_child; "
        f"start_child([sys.executable, '-m', '{ENDS_AS_ONE}', sys.executable, '-c', *sys.argv[1:]],"
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


def test_run_yaml_sets_flags_except_the_required_ones(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    flags = {"stream_interval": 2, "logprobs-mode": "raw_logprobs", "middleware": "mine.Open"}
    argv = argv_of(spec_of(tmp_path, flags), "127.0.0.1", 1234, None)
    given = dict(zip(argv, [*argv[1:], ""], strict=True))
    assert given["--stream-interval"] == "2"
    assert given["--logprobs-mode"] == "processed_logprobs"
    assert given["--middleware"] == "grpo_orch.tasks.rollout.vllm.guard.Guard"
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
    assert uncompiled_env(spec) == ({"TORCHDYNAMO_DISABLE": "1"} if spares_compiling else {})


@dataclass
class Sampler:
    """Draws by seed and, unless it is `forgetful`, by position, from logits as far apart as `spread`.

    A logit differs by up to `rounding` in another request, as sums do in another batch.
    """

    forgetful: bool = False
    rounding: float = 0.0
    spread: float = 1.0
    model: int = 0
    asked: int = 0

    def makes(self, body: dict[str, Any]) -> list[int]:
        self.asked += 1
        tokens: list[int] = list(body["prompt"])
        begun, rounded = len(tokens), random.Random(f"{self.model} {self.asked}")
        for position in range(begun, begun + body["max_tokens"]):
            weights = random.Random(f"{self.model} {tokens}")
            noise = random.Random(f"{body['seed']} {position - begun if self.forgetful else position}")
            scores = [
                (weights.gauss(0, self.spread) + rounded.uniform(-1, 1) * self.rounding) / body["temperature"]
                - math.log(-math.log(noise.random()))
                for _ in range(VOCABULARY)
            ]
            tokens.append(scores.index(max(scores)))
        return tokens[begun:]


async def tried(sampler: Sampler, refusal: str = "") -> None:
    vllm = FakeVllm("", "token", "secret")
    vllm.change(makes=sampler.makes, refusal=refusal)
    await vllm.listen()
    no_process = cast("subprocess.Popen[bytes]", None)
    try:
        async with ClientSession() as http:
            await Server("boot", "", f"http://{vllm.address}", no_process, "secret", http).sample_by_position()
    finally:
        await vllm.close()


@pytest.mark.parametrize("model", range(2))
@pytest.mark.parametrize(
    "rounding",
    [0.0, 1e-6, 0.06, 0.25],  # a bf16 logit between 16 and 32 has steps of 0.125, one of fp8 weights errs by more
)
@pytest.mark.parametrize("spread", [1.0, 4.0])
async def test_vllm_that_draws_by_position_is_fit_with_any_last_bits(
    model: int, rounding: float, spread: float
) -> None:
    await tried(Sampler(rounding=rounding, spread=spread, model=model))


@pytest.mark.parametrize("model", range(2))
@pytest.mark.parametrize("spread", [1.0, 4.0])
async def test_vllm_that_redraws_is_not_admitted(model: int, spread: float) -> None:
    with pytest.raises(Unfit, match="this vLLM does not sample by seed and position"):
        await tried(Sampler(forgetful=True, spread=spread, model=model))


async def test_vllm_that_reports_inability_is_not_admitted() -> None:
    with pytest.raises(Unfit, match="with speculative decoding"):
        await tried(Sampler(), "with speculative decoding")


def test_chance_result_is_no_proof() -> None:
    assert judge([1, 2, 3, 4], [1, 2, 3, 9]) == SamplingCheck(0.75, 0.0)
    assert judge([5, 5, 5, 6], [5, 5, 5, 6]) == SamplingCheck(1.0, 0.5)
    assert judge([5, 5, 5, 6], [5, 5, 5, 6]).passed
    assert not judge([5, 5, 6, 6], [5, 6, 6, 5]).passed


def test_a_node_names_the_variable_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUN", "NODE", "TOKEN", "WORKDIR"):
        monkeypatch.setenv(f"GRPO_ORCH_{name}", "x")
    monkeypatch.delenv("GRPO_ORCH_ATTEMPT", raising=False)
    with pytest.raises(NodeEnvMissing, match="GRPO_ORCH_ATTEMPT is not set"):
        read_node_env()
