"""The rig for SkyPilot is what it says: machines, faults, and nothing left."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.budget import HANG_S, until
from tests.rigs.sky import network
from tests.rigs.sky.rig import Instance, SkyRig
from tests.rigs.sky.sweep import ssh_sockets

pytestmark = pytest.mark.soak

_METADATA = "http://169.254.169.254/latest"
_TOKEN = f"curl -s -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' {_METADATA}/api/token"
_NOTICE = f"curl -s -w ' %{{http_code}}' {_METADATA}/meta-data/spot/instance-action"


class Owner:
    """Somebody with boto3 and ssh."""

    def __init__(self, rig: SkyRig) -> None:
        self.rig = rig
        self.key = rig.folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)], check=True)

    def launch(self, market: str = "spot", zone: str = "us-east-1a") -> Instance:
        key = self.key.with_suffix(".pub").read_text()
        user_data = f"#cloud-config\nusers:\n  - name: ubuntu\n    ssh_authorized_keys:\n      - |-\n        {key}"
        options: dict[str, Any] = {"InstanceMarketOptions": {"MarketType": "spot"}} if market == "spot" else {}
        with self.rig.inside():
            ec2 = self.rig.client("ec2", zone[:-1])
            answer = ec2.run_instances(
                ImageId="ami-785db401",
                MinCount=1,
                MaxCount=1,
                InstanceType="m6i.large",
                UserData=user_data,
                Placement={"AvailabilityZone": zone},
                **options,
            )
        return self.now(answer["Instances"][0]["InstanceId"])

    def launch_and_wait(self, market: str = "spot") -> Instance:
        instance = self.launch(market)
        until("SSH", lambda: self.ssh(instance, "true", check=False).returncode == 0)
        return instance

    def now(self, instance_id: str) -> Instance:
        return next(instance for instance in self.rig.instances() if instance.id == instance_id)

    def ssh(self, instance: Instance, command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        options = [
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
            "ConnectTimeout=5",
            "LogLevel=ERROR",
        ]
        arguments = [part for option in options for part in ("-o", option)]
        address = f"ubuntu@{instance.public_ip}"
        command_line = ["ssh", "-i", str(self.key), *arguments, address, command]
        return self.rig.run(command_line, capture_output=True, text=True, check=check, timeout=HANG_S)

    def notice(self, instance: Instance) -> str:
        """What the machine reads of its notice, and the status."""
        command = f'{_NOTICE} -H "X-aws-ec2-metadata-token: $({_TOKEN})"'
        return self.ssh(instance, command).stdout


@pytest.fixture(scope="module")
def owner(sky_rig: SkyRig) -> Owner:
    return Owner(sky_rig)


def test_a_machine_is_a_machine_of_its_own(owner: Owner) -> None:
    one, two = owner.launch_and_wait(), owner.launch_and_wait("on-demand")
    assert (one.market, two.market) == ("spot", "on-demand")
    assert owner.ssh(one, "hostname").stdout == f"ip-{one.private_ip.replace('.', '-')}\n"  # type: ignore[union-attr]
    assert owner.ssh(one, "id -un; sudo id -un").stdout == "ubuntu\nroot\n"
    assert owner.ssh(one, "cd ~ && stat -c %U .aws/config .sky .sky/catalogs && ls .aws").stdout == (
        "ubuntu\nubuntu\nubuntu\nconfig\n"
    ), "it finds AWS, and has none of the owner's keys"
    owner.ssh(one, "sudo touch /etc/mine; (nc -l -p 7000 >heard &) </dev/null 2>/dev/null")
    assert owner.ssh(two, "ls /etc/mine", check=False).returncode
    owner.ssh(two, f"echo hello | nc -N -w 5 {one.private_ip} 7000")
    assert owner.ssh(one, "cat heard").stdout == "hello\n"
    assert "PYTEST" not in owner.ssh(one, "sudo cat /proc/1/environ").stdout


def test_the_notice_is_read_by_the_right_machine_alone(owner: Owner, sky_rig: SkyRig) -> None:
    struck, other = owner.launch_and_wait(), owner.launch_and_wait()
    assert owner.ssh(struck, _NOTICE).stdout.endswith(" 401")
    assert owner.notice(struck).endswith(" 404")
    sky_rig.preempt(struck.id, grace_s=600)
    document, status = owner.notice(struck).rsplit(" ", 1)
    assert status == "200"
    assert json.loads(document)["action"] == "terminate"
    assert owner.notice(other).endswith(" 404")
    assert owner.now(struck.id).state == "running"


@pytest.mark.parametrize("grace_s", [0, 0.5])
def test_a_preempted_machine_is_terminated_and_leaves_nothing(
    owner: Owner, sky_rig: SkyRig, grace_s: float
) -> None:
    before = sky_rig.account()
    machine = owner.launch_and_wait()
    assert sky_rig.account() != before
    sky_rig.preempt(machine.id, grace_s)
    until("the machine's end", lambda: owner.now(machine.id).state == "terminated")
    with sky_rig.inside():
        answer = sky_rig.client("ec2").describe_instances(InstanceIds=[machine.id])
    reason = answer["Reservations"][0]["Instances"][0]["StateReason"]["Code"]
    assert reason == "Server.SpotInstanceTermination"
    assert sky_rig.account() == before
    assert _silent(sky_rig, machine.public_ip)


def test_crash_is_silent_and_ec2_reports_running(owner: Owner, sky_rig: SkyRig) -> None:
    struck, other = owner.launch_and_wait(), owner.launch_and_wait()
    with sky_rig.inside(), socket.create_connection((struck.public_ip, 22), timeout=HANG_S) as connection:
        assert connection.recv(3) == b"SSH"
        connection.recv(1000)
        sky_rig.crash(struck.id)
        connection.settimeout(2)
        with pytest.raises(TimeoutError):  # neither an end nor a reset
            connection.recv(1000)
    assert _silent(sky_rig, struck.public_ip)
    assert _silent(sky_rig, struck.private_ip)
    seen = owner.ssh(other, f"timeout 5 nc {struck.private_ip} 22", check=False)
    assert seen.returncode == 124  # of `timeout`: nc was waiting yet
    assert owner.now(struck.id).state == "running"


def test_a_stopped_machine_keeps_its_disk(owner: Owner, sky_rig: SkyRig) -> None:
    machine = owner.launch_and_wait("on-demand")
    owner.ssh(machine, "echo kept >disk; sync")
    with sky_rig.inside():
        ec2 = sky_rig.client("ec2")
        ec2.stop_instances(InstanceIds=[machine.id])
    assert _silent(sky_rig, machine.private_ip)
    with sky_rig.inside():
        ec2.start_instances(InstanceIds=[machine.id])
    again = owner.now(machine.id)
    until("SSH again", lambda: owner.ssh(again, "true", check=False).returncode == 0)
    assert again.public_ip != machine.public_ip
    assert owner.ssh(again, "cat disk").stdout == "kept\n"


def test_capacity_is_refused_by_zone_and_market(owner: Owner, sky_rig: SkyRig) -> None:
    sky_rig.capacity("us-east-1a", "spot", ok=False)
    with pytest.raises(ClientError, match="InsufficientInstanceCapacity"):
        owner.launch("spot", "us-east-1a")
    assert owner.launch("spot", "us-east-1b").zone == "us-east-1b"
    assert owner.launch("on-demand", "us-east-1a").zone == "us-east-1a"
    sky_rig.capacity("*", "on-demand", ok=False)
    with pytest.raises(ClientError, match="InsufficientInstanceCapacity"):
        owner.launch("on-demand", "us-west-2a")
    sky_rig.capacity("us-east-1a", "spot", ok=True)
    sky_rig.capacity("*", "on-demand", ok=True)
    assert owner.launch("spot", "us-east-1a").zone == "us-east-1a"


def test_nothing_is_left_after_the_end(sky_image: Path) -> None:
    with SkyRig(sky_image) as rig:
        Owner(rig).launch_and_wait()
        rig.popen(["setsid", "bash", "-c", "trap '' TERM; while :; do sleep 60; done"])
        assert _leftovers(rig)
    assert not _leftovers(rig)
    rig.close()  # a second time is no error


def test_a_rig_of_a_killed_process_is_swept(sky_image: Path) -> None:
    script = (
        "import pathlib, sys, time; from tests.rigs.sky.rig import SkyRig;"
        "rig = SkyRig(pathlib.Path(sys.argv[1])); rig.start(); print(rig.name, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", script, str(sky_image)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        name = process.stdout.readline().strip()
        assert network.exists(name)
        process.kill()
    subprocess.run([sys.executable, "-m", "tests.rigs.sky.sweep"], check=True)
    assert not network.exists(name)


def _silent(rig: SkyRig, address: str | None) -> bool:
    """Whether nothing at all comes back; a refusal is an answer."""
    with rig.inside():
        try:
            socket.create_connection((address, 22), timeout=2).close()
        except TimeoutError:
            return True
    return False


def _leftovers(rig: SkyRig) -> list[str]:
    """Files, mounts, processes and the namespace of the rig."""
    places = [Path("/run/netns") / rig.name, rig.folder, ssh_sockets(rig.name)]
    mine = str(rig.folder).encode()
    commands = [path for path in Path("/proc").glob("[0-9]*/cmdline") if mine in _read(path)]
    mounts = [path for path in Path("/proc").glob("[0-9]*/mountinfo") if mine in _read(path)]
    return [str(path) for path in (*places, *commands, *mounts) if path.exists()]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
