"""The trainer's reports over its restarts: one run for each timeline, a note at each beginning, no harm done."""

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

from checkpoint.records.metrics import read_metrics
from policies.model import exit_codes
from policies.model.timelines import Fork
from tasks.trainer.sinks import FAILURES_MOST, FIRST, MLFLOW_WAITS, Beginning, keep_sinks
from tasks.trainer.user_objects import BadSpec
from tests.budget import HANG_S
from tests.node.trainer.rig import GRPO, make_tiny, open_rig

STEPS = GRPO["max_steps"]
SECOND = (0, 1, 2)
STATE = SimpleNamespace(global_step=4, is_world_process_zero=True)


def beginning(by: tuple[int, int, int] = SECOND, fork: Fork | None = None) -> Beginning:
    return Beginning(by, "trainer-0-i1", fork, "digits-0a1b-t0")


class Sink:
    """A service's callback. `broken`: what of it raises."""

    def __init__(self, *broken: str) -> None:
        self.broken = broken
        self.told: list[str] = []

    def _tell(self, what: str) -> None:
        self.told.append(what)
        if what in self.broken:
            raise RuntimeError(f"{what}: no answer\nfrom the server")

    def on_train_begin(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self._tell("begin")

    def on_log(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self._tell("log")


def begin(sink: Sink, told: Beginning) -> None:
    keep_sinks([sink], told)
    sink.on_train_begin(None, STATE, None)


def test_a_report_that_cannot_begin_ends_the_runs_first_trainer_in_one_line() -> None:
    with pytest.raises(BadSpec, match=r"^grpo\.report_to: RuntimeError: begin: no answer$"):
        begin(Sink("begin"), beginning(FIRST))


def test_a_report_that_cannot_begin_again_is_left_out() -> None:
    sink = Sink("begin")
    begin(sink, beginning())
    sink.on_log(None, STATE, None)
    assert sink.told == ["begin"]


def test_a_report_that_fails_again_and_again_is_left_out() -> None:
    sink = Sink("log")
    begin(sink, beginning(FIRST))
    for _ in range(FAILURES_MOST + 5):
        sink.on_log(None, STATE, None)
    assert sink.told == ["begin", *["log"] * FAILURES_MOST]


def test_one_that_fails_now_and_then_goes_on() -> None:
    sink = Sink()
    begin(sink, beginning())
    for turn in range(4 * FAILURES_MOST):
        sink.broken = ("log",) if turn % 2 else ()
        sink.on_log(None, STATE, None)
    assert sink.told.count("log") == 4 * FAILURES_MOST


def test_a_beginning_is_told_in_words() -> None:
    fork = Fork(1, "0-4", {"learning_rate": 0.0005}, reason="diverged since step 7")
    told = ("Timeline 1", "Rolled back to checkpoint 0-4, with learning_rate 0.0005: diverged since step 7")
    assert beginning((1, 1, 2), fork).words(4) == told
    on = ("Trainer goes on", "trainer-0-i1 (attempt 3) goes on from step 9 of timeline 1")
    assert beginning((1, 1, 3), fork).words(9) == on
    assert beginning().words(0)[1] == "trainer-0-i1 (attempt 2) begins from step 0 of timeline 0"


def noted_by(kind: str, **parts: Any) -> Sink:
    sink: Sink = type(f"{kind}Callback", (Sink,), {})()
    for name, part in parts.items():
        setattr(sink, name, part)
    begin(sink, beginning())
    return sink


def test_services_are_told_where_a_trainer_began() -> None:
    told: list[Any] = []
    service = SimpleNamespace(
        log=told.append,
        alert=lambda **words: told.append(words["text"]),
        set_tag=lambda name, words: told.append((name, words)),
    )
    marks = {"orch/timeline": 0, "orch/attempt": 2, "train/global_step": 4}
    words = "trainer-0-i1 (attempt 2) goes on from step 4 of timeline 0"
    noted_by("Wandb", _wandb=SimpleNamespace(log=told.append, run=service))
    noted_by("Trackio", _trackio=service)
    noted_by("Trackio", _trackio=SimpleNamespace(log=told.append))  # an older one
    assert told == [marks, words, marks, words, marks]


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for the library: `asked` is what it was asked for, `runs` what it has."""
    for variable in ("MLFLOW_RUN_ID", "MLFLOW_TAGS", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(variable, "")  # so that it is as it was afterwards
        monkeypatch.delenv(variable)
    module = ModuleType("mlflow")
    asked, runs = list[dict[str, Any]](), list[Any]()

    def search_runs(**wanted: Any) -> list[Any]:
        asked.append(wanted)
        return runs

    vars(module).update(search_runs=search_runs, asked=asked, runs=runs)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


def test_mlflows_run_of_a_timeline_is_found_again_by_its_tag(mlflow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tags: dict[str, str] = {}
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "a"}')
    noted_by("MLflow", _ml_flow=SimpleNamespace(set_tag=tags.__setitem__))
    assert json.loads(os.environ["MLFLOW_TAGS"]) == {"team": "a", "grpo_orch.timeline": "digits-0a1b-t0"}
    assert "MLFLOW_RUN_ID" not in os.environ, "there is none yet"
    mlflow.runs.append(SimpleNamespace(info=SimpleNamespace(run_id="f00d")))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "maths")
    noted_by("MLflow", _ml_flow=SimpleNamespace(set_tag=tags.__setitem__))
    assert os.environ["MLFLOW_RUN_ID"] == "f00d"
    assert [one.get("experiment_names") for one in mlflow.asked] == [None, ["maths"]]
    assert mlflow.asked[0]["filter_string"] == "tags.`grpo_orch.timeline` = 'digits-0a1b-t0'"
    assert tags == {"grpo_orch.trainer.0-1-2": "Trainer goes on: " + beginning().words(4)[1]}


def test_the_trainer_waits_for_no_server_as_long_as_mlflow_would(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, str | None]] = []

    class Looking(Sink):
        def _tell(self, what: str) -> None:
            found.append({name: os.environ.get(name) for name in MLFLOW_WAITS})
            super()._tell(what)

    timeout, retries = MLFLOW_WAITS
    monkeypatch.setenv(timeout, "7")
    monkeypatch.delenv(retries, raising=False)
    sink = Looking("log")
    begin(sink, beginning())
    sink.on_log(None, STATE, None)
    assert found == [{timeout: "7", retries: MLFLOW_WAITS[retries]}] * 2
    assert (os.environ[timeout], os.environ.get(retries)) == ("7", None)


HANGS = """
import atexit, threading
from tasks.trainer import main
main.END_S = 0.1
{hangs}
main.end_process(5)
"""


@pytest.mark.parametrize(
    "hangs",
    ["atexit.register(threading.Event().wait)", "threading.Thread(target=threading.Event().wait).start()"],
)
def test_a_tracker_that_hangs_at_the_end_does_not_keep_the_trainer(hangs: str) -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS.format(hangs=hangs)], timeout=HANG_S, check=False)
    assert ended.returncode == 5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def test_tensorboard_has_each_step_once_after_a_trainer_was_killed(tiny: Path, tmp_path: Path) -> None:
    """TRL's own report and TensorBoard's own reader; the steps after the last checkpoint were made twice."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with open_rig(tmp_path, tiny, grpo={"report_to": "tensorboard", "logging_steps": 1, "save_steps": 4}) as rig:
        first = rig.start_trainer()
        until = time.monotonic() + HANG_S
        while max((row.step for row in read_metrics(rig.store)), default=0) < 3:
            assert first.poll() is None, rig.log().read_text()[-4000:]
            assert time.monotonic() < until
            time.sleep(0.01)
        first.kill()
        first.wait()
        assert rig.wait(rig.start_trainer(2), 2) == exit_codes.OK
        folder = rig.work / "reports" / "tensorboard" / "test"
        assert len(list(folder.iterdir())) == 2
        found = reader.EventAccumulator(str(folder)).Reload()
    steps = [one.step for one in found.Scalars("train/reward")]
    assert steps == list(range(1, STEPS + 1))
    notes = [one.tensor_proto.string_val[0].decode() for one in found.Tensors("grpo-orch/text_summary")]
    assert len(notes) == 1
    assert notes[0].startswith("Trainer ")
    assert notes[0].endswith("of timeline 0")
