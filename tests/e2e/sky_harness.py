"""A run on the rig's cloud as its user has it: every word to it and from it is the command line's."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.tiny import TINY, make_tiny
from tests.rigs.sky.rig import Instance, SkyRig

BUCKET = "runs"
MACHINE = {"infra": "aws/us-east-1", "instance_type": "m6i.large"}
# A run at full speed would keep both cores from the machines that are being launched.
PACED = """

def paced(completions, **columns):
    import time
    time.sleep(2)
    return digit_share(completions, **columns)
"""
STAGE_S = 1800.0  # only what hangs: three machines that launch at once, on a busy machine one after the other
LAST_LINES = 40


class SkyRun:
    """The tiny example in a folder of its own, on spot machines of the rig."""

    def __init__(self, rig: SkyRig, folder: Path, **changes: Any) -> None:
        self._rig = rig
        self._folder = folder
        make_tiny(folder / "build")
        (folder / "rewards.py").write_text((TINY / "rewards.py").read_text() + PACED)
        with rig.inside():
            rig.client("s3").create_bucket(Bucket=BUCKET)
        (folder / "run.yaml").write_text(yaml.safe_dump(_spec(rig, changes)))
        self.url = f"s3://{BUCKET}/tiny"
        self._status: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self.env = rig.environment | {"GRPO_ORCH_HOME": str(folder / "home"), "COLUMNS": "200"}

    def cli(
        self, *arguments: str, code: int | None = 0, timeout_s: float = STAGE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run the command line inside; with `code`, its exit code must be that one."""
        done: subprocess.CompletedProcess[str] = self._rig.run(
            [sys.executable, "-m", "grpo_orch", *arguments],
            env=self.env,
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert code is None or done.returncode == code, f"{arguments}: {done}\n{self.last_words()}"
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def up(self) -> str:
        """Start the run and follow it. Returns what `up` printed."""
        said = self.cli("up", "-y", "-d").stdout
        self._status = self._follow("status", "-w", "-o", "json")
        self._events = self._follow("events", "-f", "-o", "json")
        return said

    def status(self) -> dict[str, Any]:
        self.until("there is a status", lambda: bool(self._status))
        return self._status[-1]

    def events(self) -> list[dict[str, Any]]:
        return list(self._events)

    def _follow(self, *arguments: str) -> list[dict[str, Any]]:
        """What a command prints as it goes on: starting one for each look would take a core."""
        command = [sys.executable, "-m", "grpo_orch", *arguments]
        process = self._rig.popen(command, env=self.env, cwd=self._folder, stdout=subprocess.PIPE, text=True)
        said: list[dict[str, Any]] = []

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(json.loads(line))
            process.wait()

        threading.Thread(target=read, daemon=True).start()
        return said

    def node(self, slot: str) -> str:
        """The newest node of a slot."""
        return next(str(node["node"]) for node in self.status()["nodes"] if node["slot"] == slot)

    def phases(self) -> dict[str, str]:
        """The phase of every slot's newest node."""
        return {node["slot"]: node["phase"] for node in self.status()["nodes"]}

    def told(self, node: str, reason: str) -> None:
        """Wait until the events tell a node's reason that begins so: they come apart from the status."""

        def reasons() -> list[str]:
            return [event["reason"] for event in self.events() if event.get("node") == node and "reason" in event]

        self.until(f"{node}: {reason}", lambda: any(said.startswith(reason) for said in reasons()))

    def instance(self, node: str) -> Instance:
        """The running instance that is this node's machine."""
        found = [i for i in self.running() if node in i.cluster]
        assert len(found) == 1, (node, self.running())
        return found[0]

    def running(self) -> list[Instance]:
        return [instance for instance in self._rig.instances() if instance.state == "running"]

    def until(self, what: str, wanted: Callable[[], bool], timeout_s: float = STAGE_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not wanted():
            assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s} s\n{self.last_words()}"
            time.sleep(0.2)

    def serving(self, *slots: str) -> None:
        """Wait until these slots serve."""
        self.until(f"{slots} serve", lambda: all(self.phases().get(slot) == "serving" for slot in slots))

    def replaced(self, slot: str, node: str) -> None:
        """Wait until another node is asked for in the place of this one."""
        self.until(f"{node} is replaced", lambda: self.node(slot) != node)

    def stepped(self, more: int = 2) -> None:
        """Wait for more optimizer steps."""
        before = int(self.status()["step"])
        self.until(f"{more} steps after {before}", lambda: self.status()["step"] >= before + more)

    def daemon_log(self) -> str:
        return "".join(log.read_text() for log in self._folder.glob("home/*/daemon.log"))

    def last_words(self) -> str:
        logs = [*self._folder.glob("home/*/daemon.log"), *self._rig.folder.glob("home/.sky/api_server/server.log")]
        return "\n".join(f"--- {log}\n" + "\n".join(log.read_text().splitlines()[-LAST_LINES:]) for log in logs)


def _spec(rig: SkyRig, changes: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load((TINY / "run.yaml").read_text())
    spec.pop("rehearse")
    spec["trainer"].pop("setup")
    spec["cloud"] = "sky"
    spec["storage"] = {
        "url": f"s3://{BUCKET}/tiny",
        "options": {
            "endpoint": rig.endpoint,
            "region": "us-east-1",
            "access_key_id": "testing",
            "secret_access_key": "testing",
        },
    }
    spec["trainer"]["reward_funcs"] = "rewards.paced"
    spec["trainer"]["resources"] = MACHINE
    spec["rollout"]["resources"] = {**MACHINE, "use_spot": True}  # a lack of spot is waited out
    spec["rollout"]["env"] |= {
        "TORCHDYNAMO_DISABLE": 1,  # the image has no C++ compiler
        "VLLM_SLEEP_WHEN_IDLE": 1,
    }
    spec["grpo"] |= {"max_steps": 10_000, "save_steps": 10, "eval_strategy": "no", "learning_rate": 5e-4} | changes
    return spec
