"""A SkyPilot user's world on one machine: a cloud account, its machines, a home, and faults. See `SkyRig`."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import psutil

from tests.budget import HANG_S
from tests.rigs.sky import account, image, network
from tests.rigs.sky.home import make_home, make_outside
from tests.rigs.sky.server import CONTROL_PORT
from tests.rigs.sky.sweep import remove, sweep, user_id

Market = Literal["spot", "on-demand"]
ROOT = Path(__file__).parents[3]
_BIN = Path(sys.executable).parent
_NODES, _CONTROLLERS = "/opt/grpo-orch/env", "/opt/grpo-orch/controller"
_number = itertools.count()


@dataclass(frozen=True, slots=True)
class Instance:
    """What EC2 says of one instance; its address is None when it has none any more."""

    id: str
    state: str
    market: Market
    zone: str
    private_ip: str | None
    tags: dict[str, str]

    @property
    def cluster(self) -> str:
        """SkyPilot's name of the cluster on the cloud, or nothing."""
        return self.tags.get("ray-cluster-name", "")


class SkyRig:
    """Use as `with SkyRig(image(BUILD)) as rig`: SkyPilot, and all that a test starts, runs inside.

    The machines have 198.18.0.0/15 as their public addresses.
    """

    endpoint = account.ENDPOINT  # of AWS, S3 too, for both sides

    def __init__(self, image_folder: Path) -> None:
        """`image_folder` as from `image.image`."""
        self._image = image_folder
        self._binds, self._links = _prepared_environments()
        self.name = f"grpo-rig-{os.getpid()}-{next(_number)}"
        self.folder = Path(tempfile.gettempdir()) / self.name
        self._before: dict[str, set[str]] = {}
        self._server: subprocess.Popen[Any] | None = None
        self._held: int | None = None

    def __enter__(self) -> Self:
        """Open the account. Removes what killed tests left. Raises RuntimeError; nothing is left then."""
        sweep()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._held = image.hold(self._image)
        machines = self.folder / "machines"
        machines.mkdir(parents=True)
        (self.folder / "tmp").mkdir()
        network.create(self.name)
        make_home(self.folder / "home", self.endpoint, self._image / "wheels")
        make_outside(self.folder / "outside", self.endpoint)
        config = self.folder / "server.json"
        options = {"folder": str(machines), "image": str(self._image / "root")}
        options["home"] = str(self.folder / "outside")
        config.write_text(json.dumps(options | {"binds": [*map(str, self._binds)], "links": self._links}))
        log = self.folder / "server.log"
        with log.open("wb") as errors:
            command = [sys.executable, "-m", "tests.rigs.sky.server", str(config)]
            self._server = self.popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors)
        assert self._server.stdout
        with self._server.stdout as said:
            if said.readline() != b"ready\n":
                raise RuntimeError(f"the rig's account did not open:\n{log.read_text()[-3000:]}")
        with self.inside():
            self._before = account.inventory()

    def close(self) -> None:
        """End all: processes inside, machines, mounts, folders. Also after half a start, and twice."""
        remove(self.name)
        if self._server:
            self._server.wait()
        if self._held is not None:
            os.close(self._held)
            self._held = None

    @property
    def environment(self) -> dict[str, str]:
        """For any process that uses SkyPilot or AWS inside; nothing of the test's own environment is in it."""
        return {
            "PATH": f"{_BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder / "tmp"),
            "LANG": "C.UTF-8",
            "AWS_EC2_METADATA_DISABLED": "true",
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "SKYPILOT_USER_ID": user_id(self.name),
        }

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The calling thread is inside for the block, with its new sockets and what it starts."""
        with network.inside(self.name):
            yield

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """subprocess.Popen inside, with the rig's environment; `close` ends it."""
        with self.inside():
            process: subprocess.Popen[Any] = subprocess.Popen(
                command, **self._defaults() | {"start_new_session": True} | options
            )
        return process

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """subprocess.run inside, with the rig's environment."""
        with self.inside():
            done: subprocess.CompletedProcess[Any] = subprocess.run(command, **self._defaults() | options)
        return done

    def _defaults(self) -> dict[str, Any]:
        return {"env": self.environment, "stdin": subprocess.DEVNULL}

    def api_server_pids(self) -> list[int]:
        """SkyPilot's API server, its executors and all that they started."""
        pids = network.pids(self.name)
        sessions = {_session(pid) for pid in pids if _is_api_server(pid)} - {None}
        return [pid for pid in pids if _session(pid) in sessions]

    def turn_off(self) -> None:
        """The owner's laptop loses its power: all that was started inside ends, SSH's connections too."""
        assert self._server
        while pids := set(network.pids(self.name)) - {self._server.pid}:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def instances(self) -> list[Instance]:
        """All instances that ever were, in the order of their launches."""
        return [Instance(**item) for item in json.loads(self._control("/instances", "GET"))]

    def preempt(self, instance_id: str, grace_s: float) -> None:
        """A notice in the metadata, and the machine is taken `grace_s` later. 0: no notice. Returns at once."""
        self._control(f"/instances/{instance_id}/preempt?grace_s={grace_s}")

    def crash(self, instance_id: str) -> None:
        """The machine is silent from now on, and EC2 says that it runs."""
        self._control(f"/instances/{instance_id}/crash")

    def capacity(self, zone: str, market: Market, ok: bool) -> None:
        """Whether there are machines to be had; zone "*": whether in any, whatever is said of a single one."""
        self._control(f"/capacity/{zone}/{market}/{'some' if ok else 'none'}")

    def account(self) -> dict[str, set[str]]:
        """What is in the account and was not at the start, by kind, as "region/id"."""
        with self.inside():
            now = account.inventory()
        new = {kind: names - self._before[kind] for kind, names in now.items()}
        return {kind: names for kind, names in new.items() if names}

    def client(self, service: str, region: str = "us-east-1") -> Any:
        """A boto3 client of the account, to be used inside."""
        return account.client(service, region)

    def _control(self, path: str, method: str = "POST") -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{CONTROL_PORT}{path}", method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with self.inside(), opener.open(request, timeout=HANG_S) as answer:
            body: bytes = answer.read()
        return body


def _is_api_server(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        command = psutil.Process(pid).cmdline()
        return "sky.server.server" in command or " ".join(command).startswith("SkyPilot:")
    return False


def _session(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


def _prepared_environments() -> tuple[list[Path], dict[str, str]]:
    """This checkout's environments, as a user's prepared image would hold them: binds and links."""
    binds: dict[Path, None] = {}
    links = {}
    for place, environment in {_NODES: ROOT / ".venv-node", _CONTROLLERS: ROOT / ".venv"}.items():
        settings = (environment / "pyvenv.cfg").read_text() if environment.exists() else ""
        if home := re.search(r"^home = (.+)$", settings, re.MULTILINE):
            links[place] = str(environment)
            binds |= dict.fromkeys([environment, Path(home[1]).parent])
    binds.pop(Path("/usr"), None)  # Debian's own Python is in the image
    return list(binds), links
