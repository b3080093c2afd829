"""A managed job of SkyPilot's own on the rig: it sleeps on a spot machine, and is recovered when that is lost.

Its controller runs in the API server ("consolidation mode"). One on a machine of its own, as SkyPilot has it
beside a local server, would take its share of the same cores.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing

import yaml

from benchmarks.rig.local_run import ROOT
from tests.rigs.sky.rig import Instance, SkyRig

NAME = "sleeper"


class ManagedJob:
    """To be made before anybody starts SkyPilot's API server on the rig: it starts it, with what the job needs."""

    def __init__(self, rig: SkyRig) -> None:
        self._rig = rig
        self._records = rig.folder / "home/.sky/spot_jobs.db"
        state = rig.folder / "home/.sky"
        config = {"jobs": {"controller": {"consolidation_mode": True}}}
        (state / "config.yaml").write_text(yaml.safe_dump(config))
        plugins = {"plugins": [{"class": "benchmarks.rig.sky_plugin.NoInternet"}]}
        (state / "plugins.yaml").write_text(yaml.safe_dump(plugins))
        self._sky("api", "start")

    def launch(self, machine: dict[str, str]) -> None:
        """Submit it; returns before it runs."""
        task = {"run": "sleep infinity", "resources": machine | {"use_spot": True}}
        path = self._rig.folder / f"{NAME}.yaml"
        path.write_text(yaml.safe_dump(task))
        self._sky("jobs", "launch", "--yes", "--detach-run", "--name", NAME, str(path))

    def status(self) -> str:
        """SkyPilot's word for what the job does, from its records: to ask its server takes seconds."""
        with closing(sqlite3.connect(f"file:{self._records}?mode=ro", uri=True)) as records:
            ((status,),) = records.execute("SELECT status FROM spot").fetchall()
        return str(status)

    def instance(self) -> Instance:
        """The machine that it runs on."""
        (found,) = [i for i in self._rig.instances() if i.state == "running" and i.cluster.startswith(NAME)]
        return found

    def _sky(self, *arguments: str) -> None:
        environment = self._rig.environment | {"PYTHONPATH": str(ROOT)}
        done = self._rig.run(["sky", *arguments], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"sky {' '.join(arguments)}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
