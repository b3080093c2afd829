"""The trainer's reports: one run for each timeline over restarts, and no error of a service ends a training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs
from transformers import TrainerCallback

from grpo_orch.checkpoint.records.metrics import read_metrics
from grpo_orch.policies.model import exit_codes
from grpo_orch.tasks.trainer.reports import MLFLOW_DEFAULTS, TIMELINE_TAG, _guard
from grpo_orch.tasks.trainer.user_objects import BadSpec
from tests.budget import HANG_S
from tests.node.trainer.rig import GRPO, Rig, open_rig

STEPS = GRPO["max_steps"]
TIMELINE = "digits-0a1b-t0"
STATE = SimpleNamespace(global_step=4, is_world_process_zero=True)


class ServiceCallback(TrainerCallback):
    """A service's callback. `broken`: the events that raise."""

    def __init__(self, *broken: str) -> None:
        self.broken = broken
        self.events: list[str] = []

    def _note(self, event: str) -> None:
        self.events.append(event)
        if event in self.broken:
            raise RuntimeError(f"{event}: no answer\nfrom the server")

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._note("begin")

    def on_log(self, *_: Any, **__: Any) -> None:
        self._note("log")


def begin(callback: ServiceCallback, *, is_first: bool = False) -> None:
    _guard(callback, TIMELINE, is_first=is_first)
    callback.on_train_begin(None, STATE, None)


def test_service_that_cannot_start_ends_the_first_trainer() -> None:
    with pytest.raises(BadSpec, match=r"^grpo\.report_to: Service: RuntimeError: begin: no answer$"):
        begin(ServiceCallback("begin"), is_first=True)


@pytest.mark.parametrize(("broken", "events"), [("begin", ["begin"]), ("log", ["begin", "log"])])
def test_service_that_fails_later_is_disabled(broken: str, events: list[str]) -> None:
    callback = ServiceCallback(broken)
    with capture_logs() as logged:
        begin(callback)
        for _ in range(3):
            callback.on_log(None, STATE, None)
    assert callback.events == events
    assert [(line["event"], line["service"]) for line in logged] == [("report_disabled", "Service")]


def test_restarted_trainer_resumes_the_mlflow_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MLFLOW_RUN_ID", "MLFLOW_TAGS", "MLFLOW_EXPERIMENT_NAME", *MLFLOW_DEFAULTS):
        monkeypatch.setenv(variable, "")  # restores it after the test
        monkeypatch.delenv(variable)
    mlflow, searches, runs = ModuleType("mlflow"), list[dict[str, Any]](), list[Any]()

    def search_runs(**search: Any) -> list[Any]:
        searches.append(search)
        return runs

    vars(mlflow).update(search_runs=search_runs)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "a"}')
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")  # set in `trainer.env`
    kind = type("MLflowCallback", (ServiceCallback,), {})
    begin(kind(), is_first=True)
    assert json.loads(os.environ["MLFLOW_TAGS"]) == {"team": "a", TIMELINE_TAG: TIMELINE}
    assert "MLFLOW_RUN_ID" not in os.environ
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "60"
    assert os.environ["MLFLOW_ENABLE_ASYNC_LOGGING"] == "true"
    runs.append(SimpleNamespace(info=SimpleNamespace(run_id="f00d")))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "maths")
    begin(kind())
    assert os.environ["MLFLOW_RUN_ID"] == "f00d"
    assert [search.get("experiment_names") for search in searches] == [None, ["maths"]]
    assert searches[0]["filter_string"] == f"tags.`{TIMELINE_TAG}` = '{TIMELINE}'"


HANGS = """
import atexit, threading
from grpo_orch.tasks.trainer import main
main.END_S = 0.1
{hangs}
main.end_process(5)
"""


@pytest.mark.parametrize(
    "hangs",
    ["atexit.register(threading.Event().wait)", "threading.Thread(target=threading.Event().wait).start()"],
)
def test_tracker_that_hangs_at_exit_does_not_hold_the_trainer(hangs: str) -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS.format(hangs=hangs)], timeout=HANG_S, check=False)
    assert ended.returncode == 5


def train_until(rig: Rig, attempt: int, step: int) -> None:
    """Start a trainer, and kill it once a step is stored."""
    rig.no_nodes_from(step)
    trainer, until = rig.start_trainer(attempt), time.monotonic() + HANG_S
    while max((row.step for row in read_metrics(rig.store) if row.attempt == attempt), default=0) < step:
        assert trainer.poll() is None, rig.log(attempt).read_text()[-4000:]
        assert time.monotonic() < until
        time.sleep(0.01)
    trainer.kill()
    trainer.wait()


def test_tensorboard_has_every_step_after_a_killed_trainer(tiny: Path, tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    grpo = {"report_to": "tensorboard", "logging_steps": 1, "save_steps": 2}
    with open_rig(tmp_path, tiny, grpo=grpo) as rig:
        train_until(rig, 1, 3)
        rig.no_nodes_from(STEPS)
        assert rig.wait(rig.start_trainer(2), 2) == exit_codes.OK
        found = reader.EventAccumulator(str(rig.work / "reports" / "tensorboard" / "test")).Reload()
        rows = read_metrics(rig.store)
    logged = {(point.step, round(point.value, 5)) for point in found.Scalars("train/reward")}
    assert logged >= {(row.step, round(row.values["reward"], 5)) for row in rows}
    assert {step for step, _ in logged} == set(range(1, STEPS + 1))
