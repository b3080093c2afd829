"""The controller machine: with `--remote` the daemon runs on a small on-demand machine that SkyPilot provisions.

The machine has its own SkyPilot API server, whose records alone list the run's machines; the local SkyPilot lists
only the controller machine. The daemon's actions are in the run's store as usual.

The machine needs the user's credentials. SkyPilot 0.14 copies the credential files of the clouds' own programs to
every machine that it launches, with these exceptions: on AWS with SSO, an assumed role or keys in the environment
it copies none, and gives a machine on AWS an IAM role that can launch others; a machine on Kubernetes uses its
service account and gets no kubeconfig; Slurm has no files.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import yaml

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import ControllerMachine, RunRecord
from grpo_orch.checkpoint.store.run_store import OPTIONS_ENV, Store
from grpo_orch.orchestrator.clouds.protocol import CloudRefused, CloudUnavailable, LaunchOrder
from grpo_orch.orchestrator.clouds.sky.calls import CALL_TIMEOUT_S, LAUNCH_TIMEOUT_S
from grpo_orch.orchestrator.clouds.sky.records import SkyOffer, controller_name, nodes_name
from grpo_orch.orchestrator.clouds.sky.work import Work, places, region_of, script, work_for
from grpo_orch.orchestrator.clouds.wheel import build_wheel
from grpo_orch.orchestrator.home import (
    DIGEST_ENV,
    all_secrets,
    known_run,
    run_dir,
    saved_run_digest,
    secret_environment,
)
from grpo_orch.policies.model.node_contract import RUN_ENV
from grpo_orch.policies.model.vocabulary import Market, Role

if TYPE_CHECKING:
    from grpo_orch.orchestrator.clouds.sky.skypilot import SkyPilot

SIZE = {"cpus": "4+", "memory": "8+", "use_spot": False}  # the API server uses 1 GB
SKY_SETTINGS = "~/.sky/config.yaml"
NO_USAGE_ENV = "SKYPILOT_DISABLE_USAGE_COLLECTION"  # a user's setting applies to all machines
FOLDER_ENV = "GRPO_ORCH_RUN_FOLDER"  # path of run.yaml's folder on a machine that got a copy of it


class RemoteController:
    """The controller machine of one run. All calls are idempotent and raise CloudUnavailable."""

    def __init__(self, sky: SkyPilot, record: RunRecord, store: Store) -> None:
        self._sky = sky
        self._record = record
        self._store = store
        self.cluster, self.nodes = controller_name(record.run_id), nodes_name(record.run_id)

    def offer(self) -> SkyOffer:
        """Return the cheapest suitable machine. Raises CloudRefused when there is none."""
        return self._sky.offers(self._resources(), spot=False)[0]

    def launch(self, reason: str) -> None:
        """Ensure that the machine exists and that its supervised daemon takes the run over for `reason`.

        Idempotent. Raises CloudRefused, UntrustedRun.
        """
        known_run(self._store)
        before = documents.CONTROLLER.read(self._store)
        infra = before.infra if before else ""
        # Recorded before the launch, so that `down` knows of the machine in any case.
        requested_s = time.time()
        price = before.price_usd_per_h if before else self._likely_usd_per_h()
        stays = documents.controller_rentals(self._store, requested_s)
        machine = ControllerMachine(self.cluster, infra, requested_s, price, stays)
        documents.CONTROLLER.write(self._store, machine)
        try:
            found = self._sky.launch(self.cluster, self._work(reason), LAUNCH_TIMEOUT_S)
        except CloudRefused:
            if not self._may_exist():
                documents.CONTROLLER.write(self._store, replace(machine, refused=True))
            raise
        known = price if found.price_usd_per_h is None else found.price_usd_per_h
        machine = replace(machine, infra=found.infra, price_usd_per_h=known)
        documents.CONTROLLER.write(self._store, machine)

    def _may_exist(self) -> bool:
        """Whether the machine exists, as from an earlier launch, or cannot be ruled out."""
        try:
            return self.exists()
        except CloudUnavailable:
            return True

    def _likely_usd_per_h(self) -> float:
        """Return the price of the cheapest offer; 0: unknown, which does not prevent the launch."""
        try:
            return self.offer().price_usd_per_h
        except (CloudRefused, CloudUnavailable, IndexError):
            return 0.0

    def exists(self) -> bool:
        """Ask the cloud whether the machine exists. False also if another SkyPilot launched it."""
        return self._sky.confirm(self.cluster, CALL_TIMEOUT_S) is not None

    def has_ended(self) -> bool:
        """Whether the supervisor of the daemon has ended."""
        return self._sky.is_idle(self.cluster, CALL_TIMEOUT_S)

    def log(self, *, follow: bool) -> Iterator[str]:
        """Yield the lines of the machine's log. Raises KeyError if SkyPilot has no record of the machine."""
        return self._sky.log(self.cluster, follow=follow)

    def last_log_line(self) -> str:
        """Return the last non-empty line of the machine's log. Raises KeyError as `log` does."""
        lines = deque((line for line in self.log(follow=False) if line), maxlen=1)
        return lines[0] if lines else "no output"

    def down(self) -> None:
        """Terminate the machine, and then delete its record."""
        self._sky.down(self.cluster, CALL_TIMEOUT_S)
        documents.forget_controller(self._store, time.time())
        self._sky.drop_group(places(self._record.spec.trainer.resources), CALL_TIMEOUT_S)

    def _resources(self) -> dict[str, Any]:
        """Return resources in the trainer's places, which the credentials cover."""
        named = places(self._record.spec.trainer.resources)
        if None in named:
            return dict(SIZE)
        regions = dict.fromkeys(region_of(place) for place in named if place)
        if len(regions) == 1:
            return {**SIZE, "infra": next(iter(regions))}
        return {**SIZE, "any_of": [{"infra": region} for region in regions]}

    def _clouds(self) -> list[str]:
        """Return the clouds that the machine's SkyPilot must reach, by the names of SkyPilot's extras."""
        spec = self._record.spec
        candidates = [*places(spec.trainer.resources), *places(spec.rollout.resources)]
        named = {place.partition("/")[0].lower() for place in candidates if place}
        if None in candidates or "*" in named:
            named = {cloud.name for cloud in self._sky.clouds() if cloud.enabled}
        return sorted(named)

    def _work(self, reason: str) -> Work:
        """Return the task: a trainer's folder and files, for the daemon's nodes, and the daemon's scripts."""
        digest = saved_run_digest(self._store.url)
        settings = {name: os.environ[name] for name in (OPTIONS_ENV, NO_USAGE_ENV) if os.environ.get(name)}
        environment = {
            RUN_ENV: self._store.url,
            "GRPO_ORCH_REASON": reason,
            "GRPO_ORCH_CLOUDS": ",".join(self._clouds()),
            **({DIGEST_ENV: digest} if digest else {}),
            **settings,
            **secret_environment(all_secrets(self._record.spec, os.environ)),
        }
        order = LaunchOrder(self.cluster, Role.TRAINER, Market.ON_DEMAND, 1, environment)
        wheel = build_wheel(run_dir(self._record.run_id) / "wheel")
        work = work_for(order, self._record.spec, wheel, None)
        return replace(
            work,
            # The second script installs this project next to the environment of the first.
            setup=script("controller_setup.sh") + script("setup.sh"),
            run=script("controller_run.sh"),
            resources=self._resources(),
            hooks=(),
            idle_min=None,  # it stays until `down`: only it has the logs of the other machines
            files={**work.files, **self._settings()},
        )

    def _settings(self) -> dict[str, str]:
        """Return the file with the user's SkyPilot settings to ship, such as the machines' network."""
        settings = settings_elsewhere(self._sky.settings())
        if not settings:
            return {}
        path = run_dir(self._record.run_id) / "sky.yaml"
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(settings))
        return {SKY_SETTINGS: str(path)}


def as_shipped(record: RunRecord) -> RunRecord:
    """Return the record with the path of the run's folder on this machine."""
    folder = os.environ.get(FOLDER_ENV)
    return replace(record, spec=replace(record.spec, workdir=folder)) if folder else record


# The user's settings of SkyPilot, `~/.sky/config.yaml`, for a machine with its own SkyPilot.
_LOCAL_KEYS = ("admin_policy", "api_server", "db")  # code, a server and a database that the machine lacks
_PROXY = "ssh_proxy_command"


def settings_elsewhere(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings for a machine next to those that it launches, as SkyPilot's own controllers get them.

    Such a machine needs no proxy. Proxies by region become a region without a proxy, so that the list of allowed
    regions stays.
    """
    return {key: _without_proxies(value) for key, value in settings.items() if key not in _LOCAL_KEYS}


def _without_proxies(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_proxies(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _no_proxy(item) if key == _PROXY else _without_proxies(item) for key, item in value.items()}


def _no_proxy(command: Any) -> dict[str, None] | None:
    return dict.fromkeys(command) if isinstance(command, dict) else None
