"""The machine that the daemon lives on with `--remote`: small, on demand, provisioned by SkyPilot.

On it SkyPilot has an API server and records of its own, and the run's machines are in those alone; here only this
one machine is on record. What its daemon does is in the run's store, as ever.

It needs the user's credentials. SkyPilot 0.14 puts on every machine that it launches what the clouds' own
programs keep in files, with these exceptions: AWS is left out with SSO, an assumed role or keys in the
environment, and gives the machine a role of its own that may buy others, if the machine is on AWS itself; on
Kubernetes a machine has its service account, and no kubeconfig; Slurm has nothing to put.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import yaml

from checkpoint.records import documents
from checkpoint.records.documents import ControllerMachine, RunRecord
from checkpoint.store.run_store import OPTIONS_ENV, Store
from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable, Order
from orchestrator.clouds.sky.calls import CALL_TIMEOUT_S, LAUNCH_TIMEOUT_S
from orchestrator.clouds.sky.records import SkyOffer, controller_name, nodes_name
from orchestrator.clouds.sky.work import Work, places, region_of, script, work_for
from orchestrator.clouds.wheel import build_wheel
from orchestrator.home import DIGEST_ENV, all_secrets, handed_on, kept_run_digest, known_run, run_dir
from policies.model.node_contract import RUN_ENV
from policies.model.vocabulary import Market, Role

if TYPE_CHECKING:
    from orchestrator.clouds.sky.skypilot import SkyPilot

SIZE = {"cpus": "4+", "memory": "8+", "use_spot": False}  # an API server alone holds 1 GB
SKY_SETTINGS = "~/.sky/config.yaml"
NO_USAGE_ENV = "SKYPILOT_DISABLE_USAGE_COLLECTION"  # a user who sets it means all machines
FOLDER_ENV = "GRPO_ORCH_RUN_FOLDER"  # where the folder of run.yaml lies on a machine that got a copy of it


class RemoteController:
    """The controller machine of one run. All calls raise CloudUnavailable and may be made again."""

    def __init__(self, sky: SkyPilot, record: RunRecord, store: Store) -> None:
        self._sky = sky
        self._record = record
        self._store = store
        self.cluster, self.nodes = controller_name(record.run_id), nodes_name(record.run_id)

    def offer(self) -> SkyOffer:
        """The cheapest machine that it could be. Raises CloudRefused when there is none."""
        return self._sky.offers(self._resources(), spot=False)[0]

    def launch(self, reason: str) -> None:
        """See that the machine exists and that a daemon is watched over there, taking the run over for `reason`.

        Nothing is done twice, however often it is called. Raises CloudRefused, NotVouched.
        """
        known_run(self._store)
        before = documents.CONTROLLER.read(self._store)
        infra = before.infra if before else ""
        # Before it is launched: a machine that is not known of is not returned.
        asked_s = time.time()
        price = before.price_usd_per_h if before else self._likely_usd_per_h()
        stays = documents.controller_stays(self._store, asked_s)
        machine = ControllerMachine(self.cluster, infra, asked_s, price, stays)
        documents.CONTROLLER.write(self._store, machine)
        try:
            found = self._sky.launch(self.cluster, self._work(reason), LAUNCH_TIMEOUT_S)
        except CloudRefused:
            if not self._may_be_there():
                documents.CONTROLLER.write(self._store, replace(machine, refused=True))
            raise
        known = price if found.price_usd_per_h is None else found.price_usd_per_h
        machine = replace(machine, infra=found.infra, price_usd_per_h=known)
        documents.CONTROLLER.write(self._store, machine)

    def _may_be_there(self) -> bool:
        """Whether there is a machine that costs something, as one from before, or that cannot be told."""
        try:
            return self.exists()
        except CloudUnavailable:
            return True

    def _likely_usd_per_h(self) -> float:
        """What it costs unless its launch goes elsewhere; 0: not known, as the launch will be asked for anyway."""
        try:
            return self.offer().price_usd_per_h
        except (CloudRefused, CloudUnavailable, IndexError):
            return 0.0

    def exists(self) -> bool:
        """Whether the machine is there: its cloud is asked. False also where another SkyPilot launched it."""
        return self._sky.confirm(self.cluster, CALL_TIMEOUT_S) is not None

    def has_ended(self) -> bool:
        """Whether nobody watches over a daemon there any more."""
        return self._sky.is_idle(self.cluster, CALL_TIMEOUT_S)

    def log(self, *, follow: bool) -> Iterator[str]:
        """The lines of its log. Raises KeyError when SkyPilot has no such machine on record."""
        return self._sky.log(self.cluster, follow=follow)

    def last_words(self) -> str:
        """The last line of its log. Raises KeyError when SkyPilot has no such machine on record."""
        said = deque((line for line in self.log(follow=False) if line), maxlen=1)
        return said[0] if said else "no output"

    def down(self) -> None:
        """Return the machine, and then forget it."""
        self._sky.down(self.cluster, CALL_TIMEOUT_S)
        documents.forget_controller(self._store, time.time())
        self._sky.drop_group(places(self._record.spec.trainer.resources), CALL_TIMEOUT_S)

    def _resources(self) -> dict[str, Any]:
        """Where the trainer may be, which is where the credentials reach."""
        named = places(self._record.spec.trainer.resources)
        if None in named:
            return dict(SIZE)
        regions = dict.fromkeys(region_of(place) for place in named if place)
        if len(regions) == 1:
            return {**SIZE, "infra": next(iter(regions))}
        return {**SIZE, "any_of": [{"infra": region} for region in regions]}

    def _clouds(self) -> list[str]:
        """The clouds that its SkyPilot has to reach, by the names of SkyPilot's extras."""
        spec = self._record.spec
        candidates = [*places(spec.trainer.resources), *places(spec.rollout.resources)]
        named = {place.partition("/")[0].lower() for place in candidates if place}
        if None in candidates or "*" in named:
            named = {cloud.name for cloud in self._sky.clouds() if cloud.enabled}
        return sorted(named)

    def _work(self, reason: str) -> Work:
        """A trainer's folder and files, which the daemon hands on to its nodes, and a daemon's scripts."""
        known_as = kept_run_digest(self._store.url)
        settings = {name: os.environ[name] for name in (OPTIONS_ENV, NO_USAGE_ENV) if os.environ.get(name)}
        environment = {
            RUN_ENV: self._store.url,
            "GRPO_ORCH_REASON": reason,
            "GRPO_ORCH_CLOUDS": ",".join(self._clouds()),
            **({DIGEST_ENV: known_as} if known_as else {}),
            **settings,
            **handed_on(all_secrets(self._record.spec, os.environ)),
        }
        order = Order(self.cluster, Role.TRAINER, Market.ON_DEMAND, 1, environment)
        wheel = build_wheel(run_dir(self._record.run_id) / "wheel")
        work = work_for(order, self._record.spec, wheel, None)
        return replace(
            work,
            # The second puts this project beside the environment that the first makes.
            setup=script("controller_setup.sh") + script("setup.sh"),
            run=script("controller_run.sh"),
            resources=self._resources(),
            hooks=(),
            idle_min=None,  # it stays until `down`, for it alone knows the others' logs
            files={**work.files, **self._settings()},
        )

    def _settings(self) -> dict[str, str]:
        """The user's settings of SkyPilot as a file to ship, for they say in which network machines are."""
        settings = settings_elsewhere(self._sky.settings())
        if not settings:
            return {}
        path = run_dir(self._record.run_id) / "sky.yaml"
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(settings))
        return {SKY_SETTINGS: str(path)}


def as_shipped(record: RunRecord) -> RunRecord:
    """The record with the run's folder as this machine has it: elsewhere than where run.yaml was written."""
    folder = os.environ.get(FOLDER_ENV)
    return replace(record, spec=replace(record.spec, workdir=folder)) if folder else record


# The user's settings of SkyPilot, `~/.sky/config.yaml`, for a machine that has a SkyPilot of its own.
_LEFT_HERE = ("admin_policy", "api_server", "db")  # code, a server and a database that are not there
_PROXY = "ssh_proxy_command"


def settings_elsewhere(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that hold on a machine among those that it launches, as SkyPilot's own controllers get them.

    It reaches them without a proxy. One that is named by region stays as the region's name: no other is used.
    """
    return {key: _without_proxies(value) for key, value in settings.items() if key not in _LEFT_HERE}


def _without_proxies(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_proxies(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: _no_proxy(one) if key == _PROXY else _without_proxies(one) for key, one in value.items()}


def _no_proxy(command: Any) -> dict[str, None] | None:
    return dict.fromkeys(command) if isinstance(command, dict) else None
