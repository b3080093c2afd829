"""The one module that imports `sky`: SkyPilot's SDK with deadlines, in our types and with our errors.

Importing it takes seconds: only `cloud: sky` and `grpo-orch doctor` do. The SDK talks to an API server, that of
SKYPILOT_API_SERVER_ENDPOINT or `sky api login`, else to one on this machine, which is started when there is
none. The server may be killed at any moment: nothing but names is kept here, and every call may be made again.

Parts of SkyPilot that are not its public API, all as read in 0.14.1:

- `sky.client.sdk.click`, replaced because it prints to stdout; the handlers of its logger.
- `sky.server.common`: `get_api_server_status` and its cached response, `is_api_server_local`, `get_server_url`,
  `redact_url_password`, `ApiServerStatus`.
- `sky.server.requests.serializers.decoders`: `register_decoders`, `decode_status`.
- `sky.skypilot_config`: `to_dict`, `replace_skypilot_config_in_process`, `get_nested`, `set_nested`.
- `sky.global_user_state`: `get_glob_cluster_names`, `get_cluster_yaml_dict`.
- `sky.provision.query_instances`; `sky.adaptors.aws.client`; `sky.catalog.common.get_catalog_path`.
- `sky.utils.registry.CLOUD_REGISTRY`; `sky.utils.resources_utils.make_launchables_for_valid_region_zones`.
- of a cloud: `get_feasible_launchable_resources`, `check_quota_available`, `check_credentials`, `is_same_cloud`.
- of a handle: `launched_resources`, `cached_external_ips`, `cached_external_ssh_ports`, `cluster_yaml`,
  `cluster_name_on_cloud`; of a catalog's row, `sky.catalog.common.InstanceTypeInfo`.
- `sky.skylet.constants.API_SERVER_LOGS`, `sky.skylet.runtime_utils.expanduser`, `sky.sky_logging.silent`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sky
from sky import catalog, clouds, global_user_state, provision, sky_logging, skypilot_config
from sky.adaptors import aws
from sky.catalog import common as catalogs
from sky.client import sdk
from sky.server import common as server
from sky.server.requests.serializers import decoders
from sky.skylet import constants, runtime_utils
from sky.utils import registry, resources_utils

from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from orchestrator.clouds.sky.aws import GONE_EVERY_S, Account
from orchestrator.clouds.sky.calls import Requests, ask_cloud, find_out, lines_from
from orchestrator.clouds.sky.errors import one_line
from orchestrator.clouds.sky.offers import cheapest_first, day_fetched
from orchestrator.clouds.sky.records import (
    ApiServer,
    CloudCheck,
    Cluster,
    ClusterState,
    Instance,
    SkyOffer,
    clouds_with_machines,
    cluster_at,
    cluster_of,
    cluster_on_aws,
    decode_each,
    labelled,
    read_each,
    say_once,
    was_answered,
)
from orchestrator.clouds.sky.work import Work
from policies.model.vocabulary import Refusal

LOOK_TIMEOUT_S = 60.0  # for what SkyPilot has on record
FIRST_TIMEOUT_S = 300.0  # for the first answer of a server that was just started: minutes on busy cores
CHECK_TIMEOUT_S = 120.0  # for what clouds and catalogs are asked for

_SETTINGS = dict(skypilot_config.to_dict())  # before `_lay_over`
_requests = Requests(sdk, server, lambda: _server_log())
decoders.register_decoders("status")(decode_each(decoders.decode_status))
_overlay = contextlib.ExitStack()  # what goes along with every request of this process; never left


class SkyPilot:
    """SkyPilot as this user sees it. Every method blocks and may be called from any thread.

    All raise CloudUnavailable when SkyPilot does not answer: nothing is known then, any call may be made again.
    """

    def __init__(self, group: str | None = None, withheld: Iterable[str] = ()) -> None:
        """`group`: clusters whose names begin so are in a security group of that name on AWS, see `own_group`;
        `withheld`: clouds whose credentials no machine gets."""
        # It writes to stdout, which is for what a command was asked.
        logging.getLogger("sky").handlers[:] = [logging.NullHandler()]
        sdk.click = SimpleNamespace(secho=lambda *_, **__: None)
        if server.is_api_server_local():
            # Requests, the secrets of tasks among them, are kept there as they came, readable by anybody.
            _server_log().parent.mkdir(parents=True, exist_ok=True)
            _server_log().parent.chmod(0o700)
            if group:
                _lay_over(partial(own_group, group=group))
        else:
            group = None  # nobody here could delete it in the end: the credentials are with the server
        _lay_over(partial(keep_home, withheld=withheld))
        self._aws = Account(lambda region: aws.client("ec2", region_name=region), group, self._enabled)
        self._handles: dict[str, Any] = {}  # as last seen, by cluster
        # What asks the cloud for the machines of each cluster that was taken down and not yet seen to be gone.
        self._unproven: dict[str, Callable[[], Iterable[str]]] = {}

    def clusters(self, prefix: str) -> list[Cluster]:
        """Every cluster on SkyPilot's record whose name begins with `prefix`; no cloud is asked."""
        records = _records(prefix)
        self._handles.update({record.name: record.handle for record in records if record.handle is not None})
        return [cluster_of(record) for record in records]

    def confirm(self, name: str, timeout_s: float) -> Cluster | None:
        """Have SkyPilot ask the cloud and the machine about a cluster. Returns None when it is gone."""
        records = _status([name], timeout_s, sky.StatusRefreshMode.FORCE)
        return cluster_of(records[0]) if records else None

    def has_machines(self, name: str) -> bool | None:
        """Whether the cloud has machines of a cluster that was on record. None: ask SkyPilot, see `confirm`.

        SkyPilot's server is not asked: while it launches others it may take half a minute.
        """
        handle = self._handles.get(name)
        if handle is None:
            return None
        instances = _instances_of(handle)
        return None if instances is tuple else bool(find_out(instances))

    def is_bought(self, name: str) -> bool | None:
        """Whether the cloud has machines of a cluster that is being launched. None: that cannot be told."""
        try:
            # SkyPilot has a cluster on record before its cloud has a machine.
            if (record := _record(name, LOOK_TIMEOUT_S)) is None:
                return False
            instances = _instances_of(record.handle)
            return None if instances is tuple else bool(find_out(instances))
        except CloudUnavailable:
            return None

    def launch(self, name: str, work: Work, timeout_s: float) -> Cluster:
        """Provision the cluster or take it up where it is, set it up and submit the work.

        One that was cut off, by the deadline too, is continued by launching the same name again.
        Raises CloudRefused.
        """
        ends = {} if work.idle_min is None else {"idle_minutes_to_autostop": work.idle_min, "down": True}
        _, handle = _requests.ask(lambda: sdk.launch(_task(name, work), cluster_name=name, **ends), timeout_s)
        self._handles[name] = handle
        return cluster_at(name, ClusterState.UP, handle)

    def run_again(self, name: str, work: Work, timeout_s: float) -> None:
        """Submit the work once more to a cluster that is up, without its set-up. Raises CloudRefused."""
        _requests.ask(lambda: sdk.exec(_task(name, work), cluster_name=name), timeout_s)

    def is_idle(self, name: str, timeout_s: float) -> bool:
        """Whether everything that was submitted to the cluster has ended."""
        return not _requests.look(lambda: sdk.queue(name, skip_finished=True, all_users=True), timeout_s)

    def down(self, name: str, timeout_s: float) -> None:
        """Take the cluster down and see with its cloud that nothing of it is left. No error when there is none.

        A launch of it that is under way ends. Raises CloudUnavailable also when something is still there.
        """
        deadline = time.monotonic() + timeout_s
        if (record := _record(name, timeout_s)) is not None:
            self._unproven[name] = _instances_of(record.handle)
            _requests.look(lambda: sdk.down(name), timeout_s)
        while left := find_out(self._unproven.get(name, tuple)):
            if time.monotonic() > deadline:
                what = f"{name} was taken down, but its cloud still has {', '.join(sorted(left))}"
                raise CloudUnavailable(f"{what}; it is tried again, or end it at the cloud's console")
            time.sleep(GONE_EVERY_S)
        self._unproven.pop(name, None)
        self._handles.pop(name, None)

    def drop_group(self, places: Iterable[str | None], timeout_s: float) -> None:
        """See `Account.drop_group`."""
        self._aws.drop_group(places, timeout_s)

    def unrecorded(self, prefix: str, places: Iterable[str | None]) -> list[Instance]:
        """The machines on AWS whose label begins with `prefix` and that SkyPilot here has no record of."""
        # In this order: SkyPilot has a cluster on record before AWS has its machine.
        if not (there := self._aws.machines(prefix, places)):
            return []
        known = {record.name for record in _records(prefix)}
        return [instance for instance in there if instance.name not in known]

    def end(self, instances: Iterable[Instance]) -> None:
        """Have machines shut down that SkyPilot here has no record of."""
        self._aws.end(instances)

    def as_cluster(self, instance: Instance) -> Cluster:
        """A machine of which SkyPilot here has no record, as a cluster."""
        kind = {"infra": f"aws/{instance.region}", "instance_type": instance.machine}
        return cluster_on_aws(instance, lambda spot: sky.Resources(**kind, use_spot=spot))

    def _enabled(self) -> list[str]:
        """The clouds that SkyPilot may use."""
        found: list[str] = _requests.look(sdk.enabled_clouds, FIRST_TIMEOUT_S)
        # A user who has never run `sky check` may well have credentials.
        return found or [cloud.name for cloud in self.clouds() if cloud.enabled]

    def log(self, name: str, *, follow: bool) -> Iterator[str]:
        """Lines of the log of the cluster's newest job. Raises KeyError when there is no such cluster."""
        ask_cloud(_requests.see_server, CHECK_TIMEOUT_S)  # a look has no time to start one
        if _record(name, FIRST_TIMEOUT_S) is None:
            raise KeyError(name)
        return lines_from(name, lambda sink: _write_log(name, follow, sink))

    def offers(self, resources: dict[str, Any], *, spot: bool) -> list[SkyOffer]:
        """What could be launched in each region or zone, the cheapest first; nothing is launched.

        Raises CloudRefused when no enabled cloud has such a machine.
        """
        if not (enabled := self._enabled()):
            raise CloudRefused(Refusal.CREDENTIALS, "no cloud is enabled; see why with `grpo-orch doctor`")
        return ask_cloud(lambda: _offers(resources, spot, enabled), CHECK_TIMEOUT_S)

    def has_quota(self, offer: SkyOffer) -> bool:
        """False when the account's quota for such machines there is known to be zero (AWS and GCP tell)."""

        def ask() -> bool:
            one = sky.Resources(infra=offer.infra, instance_type=offer.instance_type, use_spot=offer.spot)
            return bool(one.cloud.check_quota_available(one))

        try:
            return ask_cloud(ask, CHECK_TIMEOUT_S)
        except (CloudRefused, CloudUnavailable) as error:
            say_once("quota_not_told", f"{offer.instance_type} in {offer.infra}", str(error))
            return True

    def clouds(self) -> list[CloudCheck]:
        """Every cloud that SkyPilot knows, its credentials tried anew; enabled ones first."""
        workspaces = _requests.look(lambda: sdk.check(None, verbose=False), FIRST_TIMEOUT_S)
        enabled = clouds_with_machines(workspaces)
        others = {name: cloud for name, cloud in registry.CLOUD_REGISTRY.items() if name not in enabled}
        reasons = ask_cloud(lambda: {name: _reason(cloud) for name, cloud in others.items()}, CHECK_TIMEOUT_S)
        return [
            *(CloudCheck(name, True, "") for name in sorted(enabled)),
            *(CloudCheck(name, False, reasons[name]) for name in sorted(reasons)),
        ]

    def settings(self) -> dict[str, Any]:
        """What the user has set in ~/.sky/config.yaml, and wherever else SkyPilot reads it."""
        return _SETTINGS

    def server(self) -> ApiServer:
        """The API server, started first where it is this machine's own and is not running."""
        ask_cloud(_requests.see_server, CHECK_TIMEOUT_S)
        info = ask_cloud(server.get_api_server_status, LOOK_TIMEOUT_S)
        endpoint = server.redact_url_password(server.get_server_url())
        return ApiServer(endpoint, info.version or "unknown", server.is_api_server_local())


def list_of(cloud: str) -> tuple[list[Any], str]:
    """A cloud's machines with GPUs in SkyPilot's catalog, and the day on which that was fetched.

    SkyPilot fetches one that is missing or hours old. Raises whatever it does when it cannot.
    """
    logging.getLogger("sky").handlers[:] = [logging.NullHandler()]
    with contextlib.redirect_stdout(io.StringIO()):  # its spinner
        listed = catalog.list_accelerators(clouds=cloud, all_regions=True)
    file = Path(catalogs.get_catalog_path(f"{cloud}/vms.csv"))
    return [row for rows in listed.values() for row in rows], day_fetched(file, cloud)


def _server_log() -> Path:
    return Path(runtime_utils.expanduser(constants.API_SERVER_LOGS))


def _task(name: str, work: Work) -> Any:
    what = {"setup": work.setup, "run": work.run, "workdir": work.workdir, "file_mounts": work.files}
    task = sky.Task(name=name, envs=work.env, secrets=work.secrets, **what)
    hooks = {"hooks": list(work.hooks)} if work.hooks else {}  # without any, those of other clouds are left alone
    task.set_resources(sky.Resources.from_yaml_config({**labelled(work.resources, name), **hooks}))
    return task


def _record(name: str, timeout_s: float) -> Any:
    records = _status([name], timeout_s)
    return records[0] if records else None


def _records(prefix: str) -> list[Any]:
    """SkyPilot's records of the clusters whose names begin so; it is kept from reading those of others."""
    pattern = f"{prefix}*"
    try:
        return _status([pattern], LOOK_TIMEOUT_S)
    except CloudUnavailable as error:
        if not was_answered(error) or not server.is_api_server_local():
            raise
    names = find_out(lambda: global_user_state.get_glob_cluster_names(pattern))
    return read_each(lambda some: _status(list(some), LOOK_TIMEOUT_S), names)


def _status(names: list[str], timeout_s: float, refresh: Any = sky.StatusRefreshMode.NONE) -> list[Any]:
    """SkyPilot's records. To an API server without logins each machine of a user is another user."""
    records: list[Any] = _requests.look(lambda: sdk.status(names, refresh=refresh, all_users=True), timeout_s)
    return records


def _instances_of(handle: Any) -> Callable[[], Iterable[str]]:
    """What asks the cloud for the machines of a cluster, also after its record is gone.

    With an API server elsewhere the credentials are there; SkyPilot's own look before it deletes a record is all.
    """
    if not server.is_api_server_local() or handle is None or handle.cluster_yaml is None:
        return tuple
    provider = find_out(lambda: global_user_state.get_cluster_yaml_dict(handle.cluster_yaml))["provider"]
    cloud = repr(handle.launched_resources.cloud)
    names = handle.cluster_name, handle.cluster_name_on_cloud
    return lambda: list(provision.query_instances(cloud, *names, provider))


def _lay_over(change: Callable[[Any], None]) -> None:
    """Change SkyPilot's configuration for this process's requests, from now on."""
    config = skypilot_config.to_dict()
    change(config)
    _overlay.enter_context(skypilot_config.replace_skypilot_config_in_process(config))


def _write_log(name: str, follow: bool, sink: io.TextIOBase) -> None:
    with sky_logging.silent():
        sdk.tail_logs(name, None, follow, output_stream=sink)


def _offers(resources: dict[str, Any], spot: bool, enabled: list[str]) -> list[SkyOffer]:
    wanted = [one.copy(use_spot=spot) for one in sky.Resources.from_yaml_config(copy.deepcopy(resources))]
    found = {name: registry.CLOUD_REGISTRY.from_str(name) for name in enabled}
    asked = f"{'spot ' if spot else ''}machines for {resources}"
    return cheapest_first(wanted, found, resources_utils.make_launchables_for_valid_region_zones, asked)


def _reason(cloud: Any) -> str:
    """Why a cloud is not enabled, asked from this machine."""
    if not server.is_api_server_local():
        return f"not enabled at {server.redact_url_password(server.get_server_url())}; run `sky check` there"
    try:
        _, reason = cloud.check_credentials(clouds.CloudCapability.COMPUTE)
    except ImportError:
        reason = f"its library is missing: pip install 'skypilot[{cloud.canonical_name()}]=={sky.__version__}'"
    except Exception as error:  # noqa: BLE001 whatever it is, it is the reason
        reason = str(error)
    return one_line(" ".join(str(reason or "left out by `allowed_clouds` in ~/.sky/config.yaml").split()))


# What a run adds to the user's configuration of SkyPilot, for its own requests.
_GROUP = ("aws", "security_group_name")


def own_group(config: Any, group: str) -> None:
    """Have clusters whose names begin with `group` in a security group of that name.

    SkyPilot's own is one for whatever a user launches from one host: these machines reach each other, those that
    the same user launches from another host are shut out, and nobody can tell when it is not needed any more.
    A group that the user's configuration names is kept to.
    """
    named = config.get_nested(_GROUP, default_value=[])
    if isinstance(named, list):
        config.set_nested(_GROUP, [*named, {f"{group}*": group}])


def keep_home(config: Any, withheld: Iterable[str]) -> None:
    """Have no machine get these clouds' credentials. The user's own setting is kept."""
    for cloud in withheld:
        if config.get_nested((cloud, "remote_identity"), default_value=None) is None:
            config.set_nested((cloud, "remote_identity"), "NO_UPLOAD")
