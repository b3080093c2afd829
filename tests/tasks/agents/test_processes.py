"""Agents in processes of their own: whatever one does costs its own session, and nothing of it stays."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from grpo_orch.tasks.agents.host import AgentResult
from grpo_orch.tasks.agents.processes import AgentHost, AgentStartError
from tests.budget import until

HERE = Path(__file__).parent
SHORT_S = 1.0


@pytest.fixture
def hosts() -> Iterator[list[AgentHost]]:
    made: list[AgentHost] = []
    yield made
    for host in made:
        host.close()


async def run(
    host: AgentHost, row: dict[str, Any] | None = None, stop: asyncio.Event | None = None, seed: int = 7
) -> AgentResult:
    return await host.run("http://127.0.0.1:1/sessions/x/v1", "key", row or {}, seed, stop or asyncio.Event())


def host_of(
    hosts: list[AgentHost], run: str | list[str], memory_bytes: int | None = None, **limits: Any
) -> AgentHost:
    hosts.append(AgentHost(f"rig_agents.{run}" if isinstance(run, str) else run, HERE, memory_bytes, **limits))
    return hosts[-1]


@pytest.mark.parametrize(
    ("agent", "reward", "why"),
    [
        ("none", None, ""),
        ("plain", 1.0, ""),
        ("raises", None, "ValueError: no\nluck"),
        ("exits", None, "it ended with exit code 3"),
        ("crashes", None, "it ended with signal 11"),
        ("text", None, "it returned '0.5'; expected a finite number or None"),
        ("infinite", None, "it returned inf; expected a finite number or None"),
        ("talks", 1.0, ""),
        ("huge", None, "it returned 1e+39; expected a number up to 1e+15 or None"),
        ("surrogate", None, "ValueError: half a pair: \\ud800"),
        ("forks", 0.75, ""),
    ],
)
async def test_agent_outcomes(hosts: list[AgentHost], agent: str, reward: float | None, why: str) -> None:
    ended = await run(host_of(hosts, agent))
    assert (ended.reward, ended.reason) == (reward, why)
    assert len(ended.output) < 20_000
    if agent == "talks":
        assert ended.output.endswith("the end\n")
    if agent == "raises":
        assert ended.output.startswith("about to fail")


async def test_hanging_agent_is_killed_with_what_it_started(hosts: list[AgentHost], tmp_path: Path) -> None:
    stop = asyncio.Event()
    running = asyncio.create_task(run(host_of(hosts, "hangs"), {"folder": str(tmp_path)}, stop))
    await asyncio.to_thread(until, "its pids", (tmp_path / "pids").exists)
    stop.set()
    assert (await running).reason == "it was ended"
    assert await gone(tmp_path)


async def test_child_left_behind_is_killed(hosts: list[AgentHost], tmp_path: Path) -> None:
    assert (await run(host_of(hosts, "leaves_child"), {"folder": str(tmp_path)})).reward == 0.25
    assert await gone(tmp_path)


@pytest.mark.parametrize("kills_host", [False, True])
async def test_agent_that_kills_its_keeper_costs_one_session(
    hosts: list[AgentHost], tmp_path: Path, kills_host: bool
) -> None:
    host = host_of(hosts, "kills_keeper")
    for _ in range(2):
        ended = await run(host, {"folder": str(tmp_path), "host": kills_host})
        assert ended.reason == "its process was killed"
    if not kills_host:
        assert await gone(tmp_path)
    for pid in filter(psutil.pid_exists, pids(tmp_path)):
        psutil.Process(pid).kill()


async def test_agent_that_stops_its_keeper_is_killed(hosts: list[AgentHost], tmp_path: Path) -> None:
    def is_stopped() -> bool:
        if not (tmp_path / "pids").exists():
            return False
        keeper = psutil.Process(psutil.Process(pids(tmp_path)[0]).ppid())
        return bool(keeper.status() == psutil.STATUS_STOPPED)

    stop = asyncio.Event()
    host = host_of(hosts, "stops_keeper", end_s=SHORT_S)
    running = asyncio.create_task(run(host, {"folder": str(tmp_path)}, stop))
    await asyncio.to_thread(until, "its keeper is stopped", is_stopped)
    stop.set()
    assert (await running).reason == "its process was killed"
    assert await gone(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_host_that_does_not_serve_costs_waiting_sessions_nothing(
    hosts: list[AgentHost], number: int
) -> None:
    host = host_of(hosts, "plain", again_s=0.1)
    host.start()
    assert host.process is not None
    host.process.send_signal(signal.SIGSTOP)
    waiting = [asyncio.create_task(run(host)) for _ in range(3)]
    await asyncio.sleep(SHORT_S)  # they are in its queue
    if number == signal.SIGKILL:
        host.process.kill()
    else:
        host.fork_s = 5 * SHORT_S
        waiting.append(asyncio.create_task(run(host)))
    assert [(await one).reward for one in waiting[-3:]] == [1.0] * 3


async def test_agent_has_as_many_files_as_before(hosts: list[AgentHost]) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1000, before[1]), before[1]))
    try:
        host = host_of(hosts, ["bash", "-c", 'echo "{\\"reward\\": $(ulimit -n)}"'])
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
        assert (await run(host)).reward == min(1000, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_memory_is_limited(hosts: list[AgentHost]) -> None:
    ended = await run(host_of(hosts, "eats", memory_bytes=1 << 30))
    assert ended.reason.startswith("MemoryError")


async def test_environment_has_no_secret_of_the_run(
    hosts: list[AgentHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_ORCH_TOKEN", "secret")
    monkeypatch.setenv("RANK", "0")
    host, told = host_of(hosts, "tells"), []
    for seed in (1, 1, 2):
        assert (await run(host, {"folder": str(tmp_path)}, seed=seed)).reward == 1.0
        told.append(json.loads((tmp_path / "told").read_text()))
    env = told[0]["env"]
    assert "secret" not in env.values()
    assert "RANK" not in env
    assert env["OPENAI_BASE_URL"].endswith("/sessions/x/v1")
    assert env["OPENAI_API_KEY"] == "key"
    assert json.loads(env["GRPO_ORCH_ROW"]) == {"folder": str(tmp_path)}
    assert told[0]["cwd"] == str(HERE)
    assert told[0]["random"] == told[1]["random"] != told[2]["random"]
    assert not Path(told[0]["tmp"]).exists()


@pytest.mark.parametrize(
    ("script", "reward", "why"),
    [
        ('echo starting; echo "{\\"reward\\": 0.5}"', 0.5, ""),
        ("echo done", None, ""),
        ('test "$(cat)" = "$GRPO_ORCH_ROW" && echo "{\\"reward\\": $OPENAI_API_KEY}"', None, "expected"),
        ("echo wrong >&2; exit 4", None, "it ended with exit code 4: wrong"),
        ('echo "{\\"reward\\": \\"much\\"}"', None, "it returned 'much'; expected a finite number or None"),
        ('echo "{\\"why\\": \\"so\\"}"', None, ""),
        ('yes | head -1; echo "{\\"reward\\": ${PIPESTATUS[0]}}"', 128.0 + signal.SIGPIPE, ""),
        (
            '(trap \'echo over; exit\' TERM; sleep 60 & wait) & sleep 0.3; echo "{\\"reward\\": 0.25}"',
            0.25,
            "",
        ),
    ],
)
async def test_command(hosts: list[AgentHost], script: str, reward: float | None, why: str) -> None:
    ended = await run(host_of(hosts, ["bash", "-c", script]), {"prompt": "p"})
    if why == "expected":  # the key is no number: what is tried is that both rows are the same
        assert "key" in ended.output
    else:
        assert (ended.reward, ended.reason) == (reward, why)


async def test_missing_command_is_named(hosts: list[AgentHost]) -> None:
    ended = await run(host_of(hosts, ["no-such-program"]))
    assert "no-such-program" in ended.reason


@pytest.mark.parametrize(
    ("path", "says"), [("no_such_module.f", "ModuleNotFoundError"), ("rig_agents.Row2", "Row2")]
)
def test_agent_that_cannot_be_imported_is_named(path: str, says: str) -> None:
    with pytest.raises(AgentStartError, match=says):
        AgentHost(path, HERE).start()


def test_function_of_another_environment_uses_its_interpreter(tmp_path: Path, hosts: list[AgentHost]) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    packages = next((tmp_path / "env/lib").iterdir()) / "site-packages"
    for package in (msgspec, psutil):
        (packages / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    (packages / "only_there.py").write_text(
        "import importlib.util, sys\n"
        "def solve(base_url, api_key, row):\n"
        "    print(sys.prefix, importlib.util.find_spec('pytest'))\n"
        "    return 0.25\n"
    )
    with pytest.raises(AgentStartError, match="only_there"):
        AgentHost("only_there.solve", tmp_path).start()
    hosts.append(AgentHost("only_there.solve", tmp_path, python="env/bin/python"))
    ended = asyncio.run(run(hosts[-1]))
    assert ended == AgentResult(0.25, "", f"{tmp_path}/env None\n")


def test_missing_interpreter_is_named(tmp_path: Path) -> None:
    with pytest.raises(AgentStartError, match=r"its interpreter does not start: .*env/bin/python"):
        AgentHost("rig_agents.plain", tmp_path, python="env/bin/python").start()


def test_agents_die_with_the_trainer(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; from grpo_orch.tasks.agents.processes import AgentHost\n"
        f"host = AgentHost('rig_agents.hangs', Path({str(HERE)!r})); host.start()\n"
        f"asyncio.run(host.run('u', 'k', {{'folder': {str(tmp_path)!r}}}, 1, asyncio.Event()))"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code])
    try:
        until("pids", (tmp_path / "pids").exists)
        assert all(map(psutil.pid_exists, pids(tmp_path)))
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    until("all of them dead", lambda: not any(map(psutil.pid_exists, pids(tmp_path))))


async def gone(folder: Path) -> bool:
    """Whether what an agent has named is dead, once somebody has collected it."""
    found = pids(folder)
    return await asyncio.to_thread(until, "none of them", lambda: not any(map(psutil.pid_exists, found)))


def pids(folder: Path) -> list[int]:
    found: list[int] = json.loads((folder / "pids").read_text())
    return found
