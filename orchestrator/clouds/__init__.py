"""Open the cloud of a run: the local one, or SkyPilot."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.clouds.local import LocalCloud
from grpo_orch.orchestrator.clouds.protocol import Cloud
from grpo_orch.orchestrator.clouds.sky.offers import price_list
from grpo_orch.orchestrator.clouds.sky.records import PriceList, controller_name, nodes_name
from grpo_orch.orchestrator.clouds.sky.remote_controller import RemoteController, as_shipped
from grpo_orch.orchestrator.clouds.sky.work import places, unused_clouds
from grpo_orch.orchestrator.home import run_dir

if TYPE_CHECKING:
    from grpo_orch.orchestrator.clouds.sky.skypilot import SkyPilot


class CloudMissing(Exception):
    """The run names a cloud that this installation cannot reach."""


def open_cloud(record: RunRecord, store: Store) -> Cloud:
    """Return the cloud of a run. Raises CloudMissing."""
    if record.spec.cloud == "local":
        return open_local(record)
    from grpo_orch.orchestrator.clouds.sky.cloud import SkyCloud  # SkyPilot takes seconds to import

    roles = (record.spec.trainer, record.spec.rollout)
    withheld = unused_clouds([place for role in roles for place in places(role.resources)], store.url)
    return SkyCloud(open_skypilot(nodes_name(record.run_id), withheld), as_shipped(record), store)


def open_controller(record: RunRecord, store: Store) -> RemoteController:
    """Return the controller machine of a run of `cloud: sky`. Raises CloudMissing."""
    return RemoteController(open_skypilot(controller_name(record.run_id)), record, store)


def list_prices(clouds: Sequence[str]) -> PriceList:
    """Return the prices of these clouds' GPU machines from SkyPilot's catalog, without asking a server or a cloud.

    Raises CloudMissing.
    """
    _require_skypilot()
    from grpo_orch.orchestrator.clouds.sky.skypilot import catalog_rows

    return price_list(catalog_rows, clouds)


def open_local(record: RunRecord) -> LocalCloud:
    """Return the local cloud of a run, which alone can rehearse faults."""
    return LocalCloud(run_dir(record.run_id) / "machines", record.spec)


def open_skypilot(group: str, withheld: Sequence[str] = ()) -> SkyPilot:
    """Return a client of SkyPilot for these clusters. Raises CloudMissing without SkyPilot."""
    _require_skypilot()
    from grpo_orch.orchestrator.clouds.sky.skypilot import SkyPilot

    return SkyPilot(group, withheld)


def _require_skypilot() -> None:
    if importlib.util.find_spec("sky") is None:
        raise CloudMissing(
            "`cloud: sky` requires SkyPilot; `grpo-orch doctor` prints the command that installs it"
        )
