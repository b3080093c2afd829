"""The clouds a run can be on, behind one protocol."""

from __future__ import annotations

from checkpoint.documents import RunRecord
from orchestrator.clouds.local import LocalCloud
from orchestrator.clouds.protocol import Cloud
from orchestrator.home import run_dir


class CloudMissing(Exception):
    """The run names a cloud that this version cannot reach."""


def open_cloud(record: RunRecord) -> Cloud:
    """Return the cloud of a run. Raises CloudMissing."""
    if record.spec.cloud == "local":
        return open_local(record)
    raise CloudMissing("cloud: sky is not there yet; use cloud: local")


def open_local(record: RunRecord) -> LocalCloud:
    """Return the local cloud of a run, with what only it can do: rehearse."""
    return LocalCloud(run_dir(record.run_id) / "machines", record.spec)
