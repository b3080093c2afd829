"""SkyPilot's SDK with deadlines, our types and our errors. The only module that imports `sky`.

The import takes seconds, so only `cloud: sky` and `grpo-orch doctor` make it. The SDK sends requests to the API
server of SKYPILOT_API_SERVER_ENDPOINT or `sky api login`, else to a local one, which is started if needed. The
server may be killed at any moment: this module keeps only names, and every call is idempotent.

Parts of SkyPilot that are not its public API, as of 0.14.1:

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

from grpo_orch.orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from grpo_orch.orchestrator.clouds.sky.aws import GONE_EVERY_S, Account
from grpo_orch.orchestrator.clouds.sky.calls import Requests, call_cloud, lines_from, query_cloud
from grpo_orch.orchestrator.clouds.sky.errors import one_line
from grpo_orch.orchestrator.clouds.sky.offers import cheapest_first, day_fetched
from grpo_orch.orchestrator.clouds.sky.records import (
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
    decode_separately,
    is_refusal,
    labelled,
    read_separately,
    warn_once,
)
from grpo_orch.orchestrator.clouds.sky.work import Work
from grpo_orch.policies.model.vocabulary import Refusal

QUERY_TIMEOUT_S = 60.0  # for SkyPilot's records
FIRST_TIMEOUT_S = 300.0  # for the first answer of a new server: minutes on busy cores
CHECK_TIMEOUT_S = 120.0  # for queries of clouds and catalogs

_SETTINGS = dict(skypilot_config.to_dict())  # before `_change_config`
_requests = Requests(sdk, server, lambda: _server_log())
decoders.register_decoders("status")(decode_separately(decoders.decode_status))
_overlay = contextlib.ExitStack()  # configuration sent with every request of this process; never closed


class SkyPilot:
    """SkyPilot for the current user. Every method blocks and may be called from any thread.

    All raise CloudUnavailable when SkyPilot does not answer; the state is unknown then, and any call may be
    repeated.
    """

    def __init__(self, group: str | None = None, withheld: Iterable[str] = ()) -> None:
        """Configure SkyPilot for this process.

        Args:
            group: name of the security group on AWS for clusters with this name prefix, see `own_group`.
            withheld: clouds whose credentials no machine gets.
        """
        # SkyPilot writes to stdout, which is reserved for a command's output.
        logging.getLogger("sky").handlers[:] = [logging.NullHandler()]
        sdk.click = SimpleNamespace(secho=lambda *_, **__: None)
        if server.is_api_server_local():
            # The server stores requests, including the secrets of tasks, readable by every user.
            _server_log().parent.mkdir(parents=True, exist_ok=True)
            _server_log().parent.chmod(0o700)
            if group:
                _change_config(partial(own_group, group=group))
        else:
            group = None  # the credentials to delete it are with the server
        _change_config(partial(withhold_credentials, withheld=withheld))
        self._aws = Account(lambda region: aws.client("ec2", region_name=region), group, self._enabled)
        self._handles: dict[str, Any] = {}  # the latest, by cluster
        # By cluster that was taken down and not yet confirmed gone: lists its machines at the cloud.
        self._unconfirmed: dict[str, Callable[[], Iterable[str]]] = {}

    def clusters(self, prefix: str) -> list[Cluster]:
        """Return every recorded cluster whose name begins with `prefix`, without asking a cloud."""
        records = _records(prefix)
        self._handles.update({record.name: record.handle for record in records if record.handle is not None})
        return [cluster_of(record) for record in records]

    def confirm(self, name: str, timeout_s: float) -> Cluster | None:
        """Have SkyPilot ask the cloud and the machine about a cluster. Return None if it is gone."""
        records = _status([name], timeout_s, sky.StatusRefreshMode.FORCE)
        return cluster_of(records[0]) if records else None

    def has_machines(self, name: str) -> bool | None:
        """Whether the cloud has machines of a recorded cluster. None: unknown here, use `confirm`.

        Does not ask SkyPilot's server, which may take 30 s while it launches other clusters.
        """
        handle = self._handles.get(name)
        if handle is None:
            return None
        instances = _instances_of(handle)
        return None if instances is tuple else bool(query_cloud(instances))

    def is_bought(self, name: str) -> bool | None:
        """Whether the cloud has machines of a cluster that is being launched. None: unknown."""
        try:
            # SkyPilot records a cluster before its cloud has a machine.
            if (record := _record(name, QUERY_TIMEOUT_S)) is None:
                return False
            instances = _instances_of(record.handle)
            return None if instances is tuple else bool(query_cloud(instances))
        except CloudUnavailable:
            return None

    def launch(self, name: str, work: Work, timeout_s: float) -> Cluster:
        """Provision the cluster, set it up and submit the work.

        Launching the same name again continues an interrupted launch, also after the deadline.
        Raises CloudRefused.
        """
        autostop = {} if work.idle_min is None else {"idle_minutes_to_autostop": work.idle_min, "down": True}
        _, handle = _requests.perform(
            lambda: sdk.launch(_task(name, work), cluster_name=name, **autostop), timeout_s
        )
        self._handles[name] = handle
        return cluster_at(name, ClusterState.UP, handle)

    def run_again(self, name: str, work: Work, timeout_s: float) -> None:
        """Submit the work again to a cluster that is up, without its set-up. Raises CloudRefused."""
        _requests.perform(lambda: sdk.exec(_task(name, work), cluster_name=name), timeout_s)

    def is_idle(self, name: str, timeout_s: float) -> bool:
        """Whether all jobs of the cluster have ended."""
        return not _requests.query(lambda: sdk.queue(name, skip_finished=True, all_users=True), timeout_s)

    def down(self, name: str, timeout_s: float) -> None:
        """Take the cluster down and confirm with its cloud that its machines are gone.

        Also ends a launch in progress. No error if the cluster does not exist. Raises CloudUnavailable also if a
        machine remains.
        """
        deadline = time.monotonic() + timeout_s
        if (record := _record(name, timeout_s)) is not None:
            self._unconfirmed[name] = _instances_of(record.handle)
            _requests.query(lambda: sdk.down(name), timeout_s)
        while left := query_cloud(self._unconfirmed.get(name, tuple)):
            if time.monotonic() > deadline:
                message = f"{name} was taken down, but its cloud still has {', '.join(sorted(left))}"
                raise CloudUnavailable(f"{message}; retrying; you can also terminate it in the cloud's console")
            time.sleep(GONE_EVERY_S)
        self._unconfirmed.pop(name, None)
        self._handles.pop(name, None)

    def drop_group(self, places: Iterable[str | None], timeout_s: float) -> None:
        """See `Account.drop_group`."""
        self._aws.drop_group(places, timeout_s)

    def unrecorded(self, prefix: str, places: Iterable[str | None]) -> list[Instance]:
        """Return the machines on AWS whose label begins with `prefix` and that have no record here."""
        # AWS first: SkyPilot records a cluster before AWS has its machine.
        if not (existing := self._aws.machines(prefix, places)):
            return []
        recorded = {record.name for record in _records(prefix)}
        return [instance for instance in existing if instance.name not in recorded]

    def terminate_instances(self, instances: Iterable[Instance]) -> None:
        """Terminate machines that the local SkyPilot has no record of."""
        self._aws.terminate(instances)

    def as_cluster(self, instance: Instance) -> Cluster:
        """Convert a machine that the local SkyPilot has no record of."""
        kind = {"infra": f"aws/{instance.region}", "instance_type": instance.machine}
        return cluster_on_aws(instance, lambda spot: sky.Resources(**kind, use_spot=spot))

    def _enabled(self) -> list[str]:
        """Return the clouds that SkyPilot may use."""
        enabled: list[str] = _requests.query(sdk.enabled_clouds, FIRST_TIMEOUT_S)
        # A user who has never run `sky check` may have credentials.
        return enabled or [cloud.name for cloud in self.clouds() if cloud.enabled]

    def log(self, name: str, *, follow: bool) -> Iterator[str]:
        """Yield the log lines of the cluster's newest job. Raises KeyError when there is no such cluster."""
        call_cloud(_requests.ensure_server, CHECK_TIMEOUT_S)  # the query below has no time to start one
        if _record(name, FIRST_TIMEOUT_S) is None:
            raise KeyError(name)
        return lines_from(name, lambda sink: _write_log(name, follow, sink))

    def offers(self, resources: dict[str, Any], *, spot: bool) -> list[SkyOffer]:
        """Return what could be launched in each region or zone, the cheapest first.

        Raises CloudRefused when no enabled cloud has such a machine.
        """
        if not (enabled := self._enabled()):
            raise CloudRefused(Refusal.CREDENTIALS, "no cloud is enabled; run `grpo-orch doctor` for the reasons")
        return call_cloud(lambda: _offers(resources, spot, enabled), CHECK_TIMEOUT_S)

    def has_quota(self, offer: SkyOffer) -> bool:
        """False if the account's quota for such machines is known to be zero (AWS and GCP report it)."""

        def check() -> bool:
            machine = sky.Resources(infra=offer.infra, instance_type=offer.instance_type, use_spot=offer.spot)
            return bool(machine.cloud.check_quota_available(machine))

        try:
            return call_cloud(check, CHECK_TIMEOUT_S)
        except (CloudRefused, CloudUnavailable) as error:
            warn_once("quota_unknown", f"{offer.instance_type} in {offer.infra}", str(error))
            return True

    def clouds(self) -> list[CloudCheck]:
        """Check the credentials of every cloud that SkyPilot supports; return the enabled clouds first."""
        workspaces = _requests.query(lambda: sdk.check(None, verbose=False), FIRST_TIMEOUT_S)
        enabled = clouds_with_machines(workspaces)
        others = {name: cloud for name, cloud in registry.CLOUD_REGISTRY.items() if name not in enabled}
        reasons = call_cloud(lambda: {name: _reason(cloud) for name, cloud in others.items()}, CHECK_TIMEOUT_S)
        return [
            *(CloudCheck(name, True, "") for name in sorted(enabled)),
            *(CloudCheck(name, False, reasons[name]) for name in sorted(reasons)),
        ]

    def settings(self) -> dict[str, Any]:
        """Return the user's settings of SkyPilot, from ~/.sky/config.yaml and SkyPilot's other sources."""
        return _SETTINGS

    def server(self) -> ApiServer:
        """Return the API server; start a local one first if needed."""
        call_cloud(_requests.ensure_server, CHECK_TIMEOUT_S)
        info = call_cloud(server.get_api_server_status, QUERY_TIMEOUT_S)
        endpoint = server.redact_url_password(server.get_server_url())
        return ApiServer(endpoint, info.version or "unknown", server.is_api_server_local())


def catalog_rows(cloud: str) -> tuple[list[Any], str]:
    """Return a cloud's GPU machines in SkyPilot's catalog, and the day the catalog was fetched.

    SkyPilot fetches a catalog that is missing or hours old, and raises various errors if that fails.
    """
    logging.getLogger("sky").handlers[:] = [logging.NullHandler()]
    with contextlib.redirect_stdout(io.StringIO()):  # SkyPilot's spinner
        listed = catalog.list_accelerators(clouds=cloud, all_regions=True)
    file = Path(catalogs.get_catalog_path(f"{cloud}/vms.csv"))
    return [row for rows in listed.values() for row in rows], day_fetched(file, cloud)


def _server_log() -> Path:
    return Path(runtime_utils.expanduser(constants.API_SERVER_LOGS))


def _task(name: str, work: Work) -> Any:
    fields = {"setup": work.setup, "run": work.run, "workdir": work.workdir, "file_mounts": work.files}
    task = sky.Task(name=name, envs=work.env, secrets=work.secrets, **fields)
    hooks = {"hooks": list(work.hooks)} if work.hooks else {}  # an empty list would override the user's hooks
    task.set_resources(sky.Resources.from_yaml_config({**labelled(work.resources, name), **hooks}))
    return task


def _record(name: str, timeout_s: float) -> Any:
    records = _status([name], timeout_s)
    return records[0] if records else None


def _records(prefix: str) -> list[Any]:
    """Return SkyPilot's records of the clusters with this name prefix, even if others are unreadable."""
    pattern = f"{prefix}*"
    try:
        return _status([pattern], QUERY_TIMEOUT_S)
    except CloudUnavailable as error:
        if not is_refusal(error) or not server.is_api_server_local():
            raise
    names = query_cloud(lambda: global_user_state.get_glob_cluster_names(pattern))
    return read_separately(lambda part: _status(list(part), QUERY_TIMEOUT_S), names)


def _status(names: list[str], timeout_s: float, refresh: Any = sky.StatusRefreshMode.NONE) -> list[Any]:
    """Return SkyPilot's records of all users: without logins, each machine of a user counts as another user."""
    records: list[Any] = _requests.query(lambda: sdk.status(names, refresh=refresh, all_users=True), timeout_s)
    return records


def _instances_of(handle: Any) -> Callable[[], Iterable[str]]:
    """Return a function that lists a cluster's machines at the cloud, also after the record is deleted.

    A remote API server has the credentials. Then return `tuple`, which lists no machines, and rely on SkyPilot's
    own check before it deletes a record.
    """
    if not server.is_api_server_local() or handle is None or handle.cluster_yaml is None:
        return tuple
    provider = query_cloud(lambda: global_user_state.get_cluster_yaml_dict(handle.cluster_yaml))["provider"]
    cloud = repr(handle.launched_resources.cloud)
    names = handle.cluster_name, handle.cluster_name_on_cloud
    return lambda: list(provision.query_instances(cloud, *names, provider))


def _change_config(change: Callable[[Any], None]) -> None:
    """Change SkyPilot's configuration for all further requests of this process."""
    config = skypilot_config.to_dict()
    change(config)
    _overlay.enter_context(skypilot_config.replace_skypilot_config_in_process(config))


def _write_log(name: str, follow: bool, sink: io.TextIOBase) -> None:
    with sky_logging.silent():
        sdk.tail_logs(name, None, follow, output_stream=sink)


def _offers(resources: dict[str, Any], spot: bool, enabled: list[str]) -> list[SkyOffer]:
    alternatives = sky.Resources.from_yaml_config(copy.deepcopy(resources))
    wanted = [alternative.copy(use_spot=spot) for alternative in alternatives]
    by_name = {name: registry.CLOUD_REGISTRY.from_str(name) for name in enabled}
    description = f"{'spot ' if spot else ''}machines for {resources}"
    return cheapest_first(wanted, by_name, resources_utils.make_launchables_for_valid_region_zones, description)


def _reason(cloud: Any) -> str:
    """Return why a cloud is not enabled, as seen from this machine."""
    if not server.is_api_server_local():
        return f"not enabled at {server.redact_url_password(server.get_server_url())}; run `sky check` there"
    try:
        _, reason = cloud.check_credentials(clouds.CloudCapability.COMPUTE)
    except ImportError:
        reason = f"its library is missing: pip install 'skypilot[{cloud.canonical_name()}]=={sky.__version__}'"
    except Exception as error:  # noqa: BLE001 an error of any kind is the reason
        reason = str(error)
    return one_line(" ".join(str(reason or "excluded by `allowed_clouds` in ~/.sky/config.yaml").split()))


# A run's additions to the user's configuration of SkyPilot, for its own requests.
_GROUP = ("aws", "security_group_name")


def own_group(config: Any, group: str) -> None:
    """Put clusters whose names begin with `group` into a security group of that name.

    SkyPilot's default is one group for all clusters that a user launches from one host: these reach each other,
    clusters launched from another host are shut out, and it is unknown when the group can be deleted. A group that
    the user's configuration names has priority.
    """
    named = config.get_nested(_GROUP, default_value=[])
    if isinstance(named, list):
        config.set_nested(_GROUP, [*named, {f"{group}*": group}])


def withhold_credentials(config: Any, withheld: Iterable[str]) -> None:
    """Withhold these clouds' credentials from all machines, unless the user's configuration sets them."""
    for cloud in withheld:
        if config.get_nested((cloud, "remote_identity"), default_value=None) is None:
            config.set_nested((cloud, "remote_identity"), "NO_UPLOAD")
