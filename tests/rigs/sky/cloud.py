"""moto's EC2 with real machines behind its instances, and faults.

Its RunInstances and TerminateInstances are replaced in the process that calls `install`; everything else of the
account is moto's.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

os.environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"  # SkyPilot's role asks for some of them

from moto.ec2.exceptions import DependencyViolationError, EC2ClientError
from moto.ec2.models import elastic_network_interfaces, instances, security_groups, subnets

from tests.rigs.sky.machine import Hardware, Machine

_FIRST_PUBLIC = 198 << 24 | 18 << 16 | 10
_run, _terminate = instances.InstanceBackend.run_instances, instances.Instance.terminate
_delete_group = security_groups.SecurityGroupBackend.delete_security_group


class NoCapacity(EC2ClientError):
    """What EC2 answers when a zone has no machine of the kind left."""

    def __init__(self, zone: str) -> None:
        super().__init__(
            "InsufficientInstanceCapacity",
            f"We currently do not have sufficient capacity in the Availability Zone you requested ({zone}).",
        )


@dataclass(slots=True)
class Cloud:
    """All instances that ever were, the notices that they got, and where no more are to be had."""

    hardware: Hardware
    instances: dict[str, instances.Instance] = field(default_factory=dict)
    notices: dict[str, dict[str, str]] = field(default_factory=dict)
    full: set[tuple[str, str]] = field(default_factory=set)  # (zone or "*", market)
    _machines: dict[str, Machine] = field(default_factory=dict)
    _workers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4))

    def check_capacity(self, zone: str, market: str) -> None:
        """Raises NoCapacity."""
        if {(zone, market), ("*", market)} & self.full:
            raise NoCapacity(zone)

    def power_on(self, instance: Any) -> None:
        """Boot the instance's machine: at once, while the answer is on its way."""
        self.instances[instance.id] = instance
        user_data = instance.user_data.decode() if instance.user_data else ""
        self._machine(instance.id).power_on(instance.private_ip, instance.public_ip, user_data)

    def power_off(self, instance_id: str) -> None:
        self._machine(instance_id).power_off()

    def scrap(self, instance_id: str) -> None:
        """Power off at once; the disk goes when there is time."""
        self.power_off(instance_id)
        self._workers.submit(self._machine(instance_id).scrap)

    def _machine(self, instance_id: str) -> Machine:
        return self._machines.setdefault(instance_id, Machine(instance_id, self.hardware))

    def preempt(self, instance_id: str, grace_s: float) -> None:
        """Give notice and, `grace_s` later, take the machine. Returns at once; no notice for a grace of 0."""
        if grace_s > 0:
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + grace_s))
            self.notices[instance_id] = {"action": "terminate", "time": at}
        timer = threading.Timer(grace_s, self._take, [instance_id])
        timer.daemon = True
        timer.start()

    def _take(self, instance_id: str) -> None:
        instance = self.instances[instance_id]
        if instance.state == "terminated":
            return
        self.scrap(instance_id)
        _terminate(instance)
        code = "Server.SpotInstanceTermination"
        instance._reason = code
        instance.state_reason = instances.StateReason(f"{code}: Spot instance termination", code)


def install(cloud: Cloud) -> None:
    """Replace moto's methods by ours."""

    def run_instances(backend: Any, *args: Any, **options: Any) -> Any:
        market = "spot" if options.get("instance_market_options") else "on-demand"
        zone = _zone(backend, options)
        cloud.check_capacity(zone, market)
        if not options.get("nics") and not options.get("subnet_id"):
            options["subnet_id"] = backend.get_default_subnets()[zone].id
        reservation = _run(backend, *args, **options)
        for instance in reservation.instances:
            _let_parts_end_with(instance)
            cloud.power_on(instance)
        return reservation

    def terminate(instance: Any) -> Any:
        if instance.state != "terminated":
            cloud.scrap(instance.id)
        return _terminate(instance)

    _replace(instances.InstanceBackend, run_instances=run_instances)
    _replace(instances.Instance, terminate=terminate)
    _replace(security_groups.SecurityGroupBackend, delete_security_group=_delete_unused_group)
    _give_out_addresses()


def _delete_unused_group(backend: Any, name: str | None = None, group_id: str | None = None) -> None:
    """EC2 keeps a group that an instance is in; moto would not."""
    for instance in backend.all_instances():
        groups = {group.id for nic in instance.nics.values() for group in nic.group_set}
        if instance.state != "terminated" and group_id in groups:
            raise DependencyViolationError(f"resource {group_id} has a dependent object")
    _delete_group(backend, name, group_id)


def _zone(backend: Any, options: dict[str, Any]) -> str:
    subnet_ids = [nic["SubnetId"] for nic in options.get("nics") or [] if "SubnetId" in nic]
    subnet_id = subnet_ids[0] if subnet_ids else options.get("subnet_id")
    if subnet_id:
        return str(backend.get_subnet(subnet_id).availability_zone)
    return str(options.get("placement") or f"{backend.region_name}a")


def _let_parts_end_with(instance: Any) -> None:
    """EC2's default for the root volume and the first interface; moto would keep both after a termination."""
    instance.nics[0].delete_on_termination = True
    if root := instance.block_device_mapping.get(instance.root_device_name):
        root.delete_on_termination = True


def _give_out_addresses() -> None:
    """No address twice: not even in two regions, whose private networks are the same, nor after a termination."""
    count = itertools.count()

    def public() -> str:
        number = _FIRST_PUBLIC + next(count)
        return ".".join(str(number >> shift & 255) for shift in (24, 16, 8, 0))

    def private(subnet: Any, instance: Any) -> str:
        address = str(subnet.cidr.network_address + 10 + next(count))
        subnet._subnet_ips[address] = instance
        return address

    _replace(elastic_network_interfaces, random_public_ip=public)
    _replace(subnets.Subnet, get_available_subnet_ip=private)


def _replace(owner: Any, **functions: Any) -> None:
    for name, function in functions.items():
        setattr(owner, name, function)
