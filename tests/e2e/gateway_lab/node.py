"""A rollout node's machine in a network namespace of its own: agent and vLLM."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import psutil

from tests.budget import until
from tests.e2e.tiny import NODE_PYTHON
from tests.rigs.gateway_net import Port

T = TypeVar("T")


class Node:
    """One rollout node's machine."""

    def __init__(self, port: Port, number: int, folder: Path, env: dict[str, str]) -> None:
        self.name = f"rollout-{number}-i1"
        self.port = port
        workdir = folder / self.name
        workdir.mkdir()
        self._env = {
            **env,
            "GRPO_ORCH_NODE": self.name,
            "GRPO_ORCH_NODE_HOST": port.host,
            "GRPO_ORCH_ATTEMPT": "1",
            "GRPO_ORCH_WORKDIR": str(workdir),
        }
        self.start()

    def start(self) -> None:
        with self.port.inside():
            self._agent = subprocess.Popen([NODE_PYTHON, "-m", "grpo_orch.tasks.rollout.agent"], env=self._env)

    def agent(self) -> int:
        """The pid of its agent."""
        return self._agent.pid

    def server(self) -> int | None:
        """The pid of vLLM's HTTP server."""
        found = [
            pid
            for pid, line in self._processes()
            if ".vllm.api_server" in line and "machine.process_tree" not in line
        ]
        return found[0] if found else None

    def engine(self) -> int:
        """The pid of vLLM's engine."""
        (pid,) = [pid for pid, line in self._processes() if line.startswith("VLLM::EngineCor")]
        return pid

    def serves_at(self) -> int:
        """The port that vLLM's server was told."""
        server = until(f"a server on {self.name}", self.server)
        said = re.search(r"--port (\d+)", dict(self._processes())[server])
        assert said is not None
        return int(said[1])

    def end(self) -> None:
        """All of it at once, as when the machine is gone."""
        for pid in self.port.pids():
            with contextlib.suppress(ProcessLookupError):  # some end with one before them
                os.kill(pid, signal.SIGKILL)
        self._agent.wait()

    def _processes(self) -> Iterator[tuple[int, str]]:
        for pid in self.port.pids():
            with contextlib.suppress(psutil.NoSuchProcess):
                yield pid, " ".join(psutil.Process(pid).cmdline())
