"""A machine: namespaces over a root of its own, with a cable to the rig's router. Runs in the rig's namespace."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.rigs.sky.network import HOST_ADDRESS

_INIT = Path(__file__).with_name("machine.sh")
_NAMESPACES = "--net --mount --pid --uts --ipc --fork --kill-child --propagation private"
_UNSHARE = ["unshare", *_NAMESPACES.split()]


@dataclass(frozen=True, slots=True)
class Hardware:
    """What all machines of a rig are made from; `binds` are folders of the host that they see, read-only."""

    folder: Path  # a folder for each machine lies in it
    image: Path
    binds: tuple[Path, ...]
    links: dict[str, str]  # symbolic links that a machine has, with their targets
    home: Path  # what the home of a machine's user has from the start


@dataclass(slots=True)
class Machine:
    """One machine; its disk outlives `power_off`, until `scrap`."""

    name: str
    hardware: Hardware
    _process: subprocess.Popen[bytes] | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)  # commands come at any moment, in mid boot too

    @property
    def _folder(self) -> Path:
        return self.hardware.folder / self.name

    @property
    def _cable(self) -> str:
        return f"m{self.name[-12:]}"  # an interface's name has 15 characters at most

    def power_on(self, private: str, public: str, user_data: str) -> None:
        """Boot, with the private and the public address. Returns before sshd answers."""
        with self._lock:
            self._boot(private, public, user_data)

    def _boot(self, private: str, public: str, user_data: str) -> None:
        self._prepare_disk(private, user_data)
        hardware = self.hardware
        binds = [str(bind) for bind in hardware.binds]
        arguments = [str(self._folder), str(hardware.image), private, public, HOST_ADDRESS, *binds]
        command = [*_UNSHARE, "bash", str(_INIT), *arguments]
        with (self._folder / "console.log").open("ab") as console:
            self._process = process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=console,
                env={"PATH": os.environ["PATH"]},
                start_new_session=True,
            )
        assert process.stdin
        assert process.stdout
        with process.stdin, process.stdout:
            process.stdout.readline()
            self._plug_in(process.pid, private, public)
            process.stdin.write(b"\n")

    def power_off(self) -> None:
        """All at once, and in silence: the cable goes first, so that no process says good-bye."""
        with self._lock:
            if self._process is None:
                return
            subprocess.run(["ip", "link", "delete", self._cable], check=False, stderr=subprocess.DEVNULL)
            self._process.kill()
            self._process.wait()
            self._process = None

    def scrap(self) -> None:
        """Power off, for ever, and throw the disk away."""
        with self._lock:
            self.power_off()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _plug_in(self, pid: int, private: str, public: str) -> None:
        batch = f"""
            link add name {self._cable} type veth peer name eth0 netns {pid}
            link set {self._cable} up
            route add {private}/32 dev {self._cable} src {HOST_ADDRESS}
            route add {public}/32 dev {self._cable} src {HOST_ADDRESS}
        """
        subprocess.run(["ip", "-batch", "-"], input=batch.encode(), check=True)

    def _prepare_disk(self, private: str, user_data: str) -> None:
        upper = self._folder / "upper"
        for folder in (upper / "etc", self._folder / "work", self._folder / "root"):
            folder.mkdir(parents=True, exist_ok=True)
        name = f"ip-{private.replace('.', '-')}"
        (upper / "etc/hostname").write_text(f"{name}\n")
        (upper / "etc/hosts").write_text(f"127.0.0.1 localhost\n{private} {name}\n")
        for link, target in self.hardware.links.items():
            path = upper / link.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.symlink_to(target)
        self._make_user(user_data)

    def _make_user(self, user_data: str) -> None:
        """As cloud-init does with the `users` part of SkyPilot's user data; the user is in the image."""
        user = re.search(r"^\s*- name: (\S+)", user_data, re.MULTILINE)
        keys = re.findall(r"^\s*(?:- )?((?:ssh-|ecdsa-)\S+ \S+.*)$", user_data, re.MULTILINE)
        if not user:
            return
        home = self._folder / "upper" / "home" / user[1]
        ssh = home / ".ssh"
        shutil.copytree(self.hardware.home, home, dirs_exist_ok=True)
        ssh.mkdir(exist_ok=True)
        (ssh / "authorized_keys").write_text("".join(f"{key.strip()}\n" for key in keys))
        owner = (self.hardware.image / "home" / user[1]).stat()
        given = (home / path.relative_to(self.hardware.home) for path in self.hardware.home.rglob("*"))
        for path in (home, ssh, ssh / "authorized_keys", *given):
            os.chown(path, owner.st_uid, owner.st_gid)
        ssh.chmod(0o700)
        (ssh / "authorized_keys").chmod(0o600)


def kill_all(folder: Path) -> None:
    """Kill the machines whose folders lie in `folder`, whoever started them; returns when all are dead."""
    while alive := [process for process in Path("/proc").glob("[0-9]*") if _is_of_machine(process, folder)]:
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)
        time.sleep(0.02)


def _is_of_machine(process: Path, folder: Path) -> bool:
    """Whether it sees a machine's disk, or starts a machine whose disk is not mounted yet."""
    prefix = f"{folder}/".encode()
    with contextlib.suppress(OSError):  # it ended
        if prefix in (process / "mountinfo").read_bytes():
            return True
        arguments = (process / "cmdline").read_bytes().split(b"\0")
        return arguments[0] == _UNSHARE[0].encode() and any(a.startswith(prefix) for a in arguments)
    return False
