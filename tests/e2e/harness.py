"""A run as its user has it: the real command line, a real daemon, real processes; only the folder is a test's."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import psutil
import yaml

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.clouds.local import carries_mark, kill_all, machine_record, marked_processes
from grpo_orch.policies.model.node_contract import MACHINE
from grpo_orch.policies.model.state import RunState
from tests.budget import HANG_S, until
from tests.rigs.store.server import S3Server

ROOT = Path(__file__).parents[2]


class Run:
    """One run.yaml in a folder of its own, with a home of its own; its store is there too, or at `server`."""

    def __init__(
        self,
        folder: Path,
        spec: dict[str, Any],
        node_python: Path,
        server: S3Server | None = None,
        file: str = "run.yaml",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.yaml = folder / file
        self._state, self._number = RunState(), 0
        # Of this test alone, also beside another process's of the same name: `end` kills by it.
        name = f"{folder.parent.parent.name}-{folder.parent.name}"
        self.url = (folder / "store").as_uri() if server is None else server.url(name)
        self.options = {} if server is None else server.options()
        storage = {"url": self.url, "options": self.options} if self.options else self.url
        self.yaml.write_text(yaml.safe_dump({**spec, "storage": storage}))
        self.env = {
            **os.environ,
            "GRPO_ORCH_HOME": str(folder / "home"),
            "GRPO_ORCH_NODE_PYTHON": str(node_python),
            "COLUMNS": "200",
        }

    @property
    def store(self) -> Store:
        return Store(self.url, retry_s=1.0, options=self.options)

    def of(self, url: str) -> Store:
        """Another store beside the run's, or in it."""
        return Store(url, retry_s=1.0, options=self.options)

    @property
    def state(self) -> RunState:
        """The run's state now. Tests look often: only entries that are new since the last look are read."""
        if records := journal.read(self.store, self._number):
            self._number, self._state = records[-1].number, journal.advance(self._state, records)
        return self._state

    @property
    def daemon_pid(self) -> int:
        lease = documents.LEASE.read(self.store)
        assert lease is not None
        return lease.pid

    def cli(
        self, *arguments: str, code: int | None = 0, timeout_s: float = HANG_S
    ) -> subprocess.CompletedProcess[str]:
        """Run the command line; with `code`, its exit code must be that one."""
        done = subprocess.run(
            [sys.executable, "-m", "grpo_orch", *arguments],
            env=self.env,
            cwd=self.yaml.parent,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert code is None or done.returncode == code, (
            f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def json(self, *arguments: str) -> Any:
        return json.loads(self.cli(*arguments, "-o", "json").stdout)

    def machine(self, node: str) -> Path:
        (found,) = (Path(self.env["GRPO_ORCH_HOME"])).glob(f"*/machines/{node}")
        return found

    def pids(self, node: str, module: str = "") -> list[int]:
        """The processes of a node's machine; with `module`, those that were started to run it."""
        pids, found = marked_processes(self.machine(node)), psutil.process_iter(["cmdline"])
        running = (one.pid for one in found if not module or module in (one.info["cmdline"] or ()))
        return sorted({*pids} & {*running})

    def pid(self, node: str, module: str) -> int:
        """The process that runs it there, once there is one; for a moment its fork may look like another."""
        found: list[int] = []

        def one() -> bool:
            found[:] = self.pids(node, module)
            return len(found) == 1

        self.until(f"{module} on {node}", one)
        return found[0]

    def own_pids(self) -> dict[str, int]:
        """Of each machine that lives, the process that started all others; those may come and go."""
        found = {}
        for path in Path(self.env["GRPO_ORCH_HOME"]).glob(f"*/machines/*/{MACHINE}"):
            with contextlib.suppress(FileNotFoundError):  # it is being terminated
                pid = machine_record(path.parent).pid
                if carries_mark(pid, path.parent):
                    found[path.parent.name] = pid
        return found

    def until(self, what: str, wanted: Callable[[], bool], timeout_s: float = HANG_S) -> None:
        """Wait until `wanted()`; on time-out, fail with what the daemon's log says last."""
        until(what, wanted, timeout_s, self.last_words)

    def last_words(self, lines: int = 15) -> str:
        logs = sorted(Path(self.env["GRPO_ORCH_HOME"]).glob("*/**/*log"))
        return "\n".join(f"--- {log}\n" + "\n".join(log.read_text().splitlines()[-lines:]) for log in logs)

    @contextlib.contextmanager
    def up(self) -> Iterator[Self]:
        """Start the run for the block, and take everything down at its end, however far the test came."""
        try:
            self.cli("up", str(self.yaml), "-y", "-d")
            yield self
        finally:
            self.end()

    @contextlib.contextmanager
    def edited(self) -> Iterator[dict[str, Any]]:
        """Change the run.yaml: what it holds, to be changed in the block."""
        spec = yaml.safe_load(self.yaml.read_text())
        yield spec
        self.yaml.write_text(yaml.safe_dump(spec))

    def end(self) -> None:
        """Take everything down."""
        kill(self._own_daemons())
        for folder in Path(self.env["GRPO_ORCH_HOME"]).glob("*/machines/*"):
            kill_all(folder)
            if (spool := folder / "work" / "spool").is_symlink():
                shutil.rmtree(spool.resolve(), ignore_errors=True)

    def _own_daemons(self) -> list[int]:
        found = psutil.process_iter(["cmdline"])
        return [one.pid for one in found if self.url in (one.info["cmdline"] or ()) and one.pid != os.getpid()]


def kill(pids: Iterable[int]) -> None:
    """SIGKILL, all of them. Some may end before their turn: by themselves, or with one whose child they are."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
