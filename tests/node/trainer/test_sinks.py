"""The trainer's reports over its restarts: one run for each timeline, a note at each beginning, no harm done."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from checkpoint.records.metrics import Row, read_metrics
from policies.model import exit_codes
from policies.model.timelines import Fork
from tasks.trainer import sinks, unhurried
from tasks.trainer.event_files import write_past
from tasks.trainer.sinks import FAILURES_MOST, FIRST, Beginning, keep_sinks
from tasks.trainer.user_objects import BadSpec
from tests.budget import HANG_S
from tests.node.trainer.rig import GRPO, Rig, make_tiny, open_rig

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

    def on_train_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self._tell("end")


def begin(sink: Sink, told: Beginning) -> None:
    keep_sinks([sink], told)
    sink.on_train_begin(None, STATE, None)


def test_a_report_that_cannot_begin_ends_the_runs_first_trainer_in_one_line() -> None:
    with pytest.raises(BadSpec, match=r"^grpo\.report_to: Sink: RuntimeError: begin: no answer$"):
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


def service_of(kind: str, *, goes_on: bool) -> dict[str, Any]:
    """The library of a service that has, or has not, gone on with a run."""

    def ignore(*_: Any, **__: Any) -> None:
        pass

    run = SimpleNamespace(
        resumed=goes_on, alert=ignore, _next_step=6 if goes_on else 0, info=SimpleNamespace(run_id="f00d")
    )
    held = SimpleNamespace(current_run=SimpleNamespace(get=lambda: run))
    library = SimpleNamespace(run=run, context_vars=held, log=ignore, alert=ignore, set_tag=ignore)
    history = [SimpleNamespace(step=5)] if goes_on else []
    library.active_run = lambda: run
    library.MlflowClient = lambda: SimpleNamespace(get_metric_history=lambda *_: history)
    return {{"Wandb": "_wandb", "Trackio": "_trackio", "MLflow": "_ml_flow"}[kind]: library}


class Forgetful(Sink):
    """MLflow's library forgets the run's id once it has gone on with it."""

    def on_train_begin(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        os.environ.pop("MLFLOW_RUN_ID", None)
        self._tell("begin")


@pytest.mark.parametrize("kind", ["Wandb", "Trackio", "MLflow"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_step_made_again_is_told_once(kind: str, goes_on: bool, mlflow: Any) -> None:
    if goes_on:
        mlflow.runs.append(SimpleNamespace(info=SimpleNamespace(run_id="f00d")))
    sink: Any = type(f"{kind}Callback", (Forgetful,), {})()
    vars(sink).update(service_of(kind, goes_on=goes_on))
    before = [Row(0, 5, 1.0, 1, {"reward": 0.5, "orch/nonfinite/kl": 1.0})]
    keep_sinks([sink], replace(beginning(), past=lambda: before))
    state = SimpleNamespace(global_step=4, is_world_process_zero=True)
    sink.on_train_begin(None, state, None)
    again = {"reward": 0.5, "kl": float("nan")}
    for step, logs in ((5, again), (5, {"eval_reward": 0.5}), (6, again)):
        state.global_step = step
        sink.on_log(None, state, None, logs=logs)
    assert sink.told == ["begin", *["log"] * (2 if goes_on else 3)]


def test_a_step_that_was_still_to_be_sent_when_its_trainer_was_killed_is_told(mlflow: Any) -> None:
    mlflow.runs.append(SimpleNamespace(info=SimpleNamespace(run_id="f00d")))
    sink: Any = type("MLflowCallback", (Sink,), {})()
    vars(sink).update(service_of("MLflow", goes_on=True))  # which has step 5
    before = [Row(0, step, 1.0, 1, {"reward": 0.5}) for step in (5, 6)]
    keep_sinks([sink], replace(beginning(), past=lambda: before))
    state = SimpleNamespace(global_step=4, is_world_process_zero=True)
    sink.on_train_begin(None, state, None)
    for state.global_step in (5, 6, 7):
        sink.on_log(None, state, None, logs={"reward": 0.5})
    assert sink.told == ["begin", "log", "log"]


def test_a_server_that_is_late_is_told_each_step_once(mlflow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has of an earlier trainer is known once it answers."""
    monkeypatch.setattr(sinks, "BEGIN_S", 0.05)
    back = threading.Event()
    mlflow.runs.append(SimpleNamespace(info=SimpleNamespace(run_id="f00d")))
    sink: Any = type("MLflowCallback", (Sink,), {})()
    vars(sink).update(service_of("MLflow", goes_on=True))  # which has step 5
    monkeypatch.setattr(mlflow, "search_runs", lambda **_: mlflow.runs if back.wait(HANG_S) else [])
    keep_sinks([sink], replace(beginning(), past=lambda: [Row(0, 5, 1.0, 1, {"reward": 0.5})]))
    state = SimpleNamespace(global_step=4, is_world_process_zero=True)
    sink.on_train_begin(None, state, None)
    for state.global_step in (5, 6):
        sink.on_log(None, state, None, logs={"reward": 0.5})
    assert sink.told == []
    back.set()
    sink.on_train_end(None, state, None)  # which waits for all before it
    assert sink.told == ["begin", "log", "end"]


@pytest.mark.usefixtures("impatient", "mlflow")
def test_what_mlflow_still_has_to_send_holds_no_trainer_at_its_end() -> None:
    back, ended = threading.Event(), threading.Event()

    class Sending(Sink):
        def on_train_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
            assert back.wait(HANG_S)
            ended.set()

    sink: Any = type("MLflowCallback", (Sending,), {})()
    begin(sink, beginning(FIRST))
    with capture_logs() as logged:
        sink.on_train_end(None, STATE, None)
    assert not ended.is_set()
    assert [one["event"] for one in logged] == ["report_failed"]
    back.set()
    assert ended.wait(HANG_S)


class Folder(Sink):
    """TensorBoard on a folder that does not answer before `back`."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()  # with the first step
        self.back = threading.Event()
        self.ended = threading.Event()
        self.logging_dir = "nowhere"
        self._SummaryWriter = dict
        self.tb_writer = SimpleNamespace(add_text=lambda *_: None, flush=lambda: None)

    def on_log(self, *args: Any, **told: Any) -> None:
        _, state, _ = args
        self.begun.set()
        assert self.back.wait(HANG_S)
        self.told.append(f"{state.global_step} {told['logs']}")

    def on_train_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self.ended.set()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "STEP_S", 0.05)


@pytest.mark.usefixtures("impatient")
def test_a_folder_that_hangs_holds_no_step_and_has_them_all_once_it_is_back() -> None:
    folder: Any = type("TensorBoardCallback", (Folder,), {})()
    keep_sinks([folder], beginning(FIRST))
    state = SimpleNamespace(global_step=0, is_world_process_zero=True)
    folder.on_train_begin(None, state, None)
    for state.global_step in range(1, 100):
        logs = {"reward": 0.5}
        folder.on_log(None, state, None, logs=logs)
        logs.clear()  # whoever logged may do as they like with theirs
    assert folder.told == ["begin"], "nobody has waited for it"
    folder.back.set()
    folder.on_train_end(None, state, None)
    assert folder.ended.wait(HANG_S)
    assert folder.told[1:] == [f"{step} {{'reward': 0.5}}" for step in range(1, 100)]


@pytest.mark.usefixtures("impatient")
def test_a_folder_that_never_comes_back_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unhurried, "WAITING_MOST", 5)
    folder: Any = type("TensorBoardCallback", (Folder,), {})()
    begin(folder, beginning(FIRST))
    with capture_logs() as logged:
        folder.on_log(None, STATE, None, logs={})
        assert folder.begun.wait(HANG_S)  # from here it makes no room for others
        for _ in range(99):
            folder.on_log(None, STATE, None, logs={})
        folder.on_train_end(None, STATE, None)
    assert [one["event"] for one in logged] == ["report_failed", *["report_failed"] * 2, "report_left_out"]
    folder.back.set()


def test_a_folder_that_hangs_at_the_start_is_a_mistake_in_run_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "BEGIN_S", 0.05)
    folder: Any = type("TensorBoardCallback", (Folder,), {})()
    folder._tell = lambda _: folder.back.wait(HANG_S)
    with pytest.raises(BadSpec, match=r"^grpo\.report_to: TensorBoard: Late: not done within 0\.05 s$"):
        begin(folder, beginning(FIRST))
    keep_sinks([later := type("TensorBoardCallback", (Folder,), {})()], beginning())
    later._tell = folder._tell
    later.on_train_begin(None, STATE, None)  # of any later trainer, only the reports are late
    folder.back.set()
    later.back.set()
    later.on_train_end(None, STATE, None)
    assert later.ended.wait(HANG_S)


class Writer:
    """A SummaryWriter's file, its scalars as lines."""

    def __init__(self, log_dir: str) -> None:
        self._path = Path(log_dir, "events.out.tfevents.1")
        self._lines: list[str] = []

    def add_scalar(self, name: str, value: float, step: int, time_s: float) -> None:
        self._lines.append(f"{step} {name} {value:g} at {time_s:g}")

    def close(self) -> None:
        self._path.write_text("\n".join(self._lines))


def test_the_past_is_what_trl_had_logged(tmp_path: Path) -> None:
    eighth = Row(0, 8, 12.0, 1, {"reward": 0.5, "eval_reward": 0.25, "orch/nonfinite/kl": 1.0, "orch/tokens": 9.0})
    write_past(Writer, [eighth, Row(0, 9, 13.0, 1, {"kl": 1.5})], tmp_path / "new")
    (file,) = (tmp_path / "new").iterdir()
    assert file.name == "events.out.tfevents.1"
    assert file.read_text().splitlines() == [
        "8 train/reward 0.5 at 12",
        "8 eval/reward 0.25 at 12",
        "8 train/kl nan at 12",
        "9 train/kl 1.5 at 13",
    ]


HANGS = """
import atexit, threading
from tasks.trainer import main
main.END_S = 0.1
{hangs}
main.end_process(5)
"""


@pytest.mark.parametrize(
    "hangs",
    [
        "atexit.register(threading.Event().wait)",
        "threading.Thread(target=threading.Event().wait).start()",
        "from tasks.trainer.unhurried import Unhurried; do = Unhurried().do\n"
        "try:\n    do(threading.Event().wait, 0.01)\nexcept Exception: pass",
    ],
)
def test_a_tracker_that_hangs_at_the_end_does_not_keep_the_trainer(hangs: str) -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS.format(hangs=hangs)], timeout=HANG_S, check=False)
    assert ended.returncode == 5


LATE = """
import threading
from tasks.trainer import main
from tasks.trainer.unhurried import Late, Unhurried
back, service = threading.Event(), Unhurried()
try:
    service.do(back.wait, 0.01)
except Late:
    service.do(lambda: print("told", flush=True), 0.01)
answers = threading.Timer(1.0, back.set)
answers.daemon = True
answers.start()
main.end_process(0)
"""


def test_a_service_that_answers_again_only_at_the_end_is_told_what_waited_for_it() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LATE], timeout=HANG_S, check=False, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (0, "told\n")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


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


def test_tensorboard_has_each_step_once_whatever_was_killed(tiny: Path, tmp_path: Path) -> None:
    """TRL's own report and TensorBoard's own reader; the steps after the last checkpoint are made twice, and the
    last trainer begins on a disk that has nothing of the run."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with open_rig(tmp_path, tiny, grpo={"report_to": "tensorboard", "logging_steps": 1, "save_steps": 2}) as rig:
        folder = rig.work / "reports" / "tensorboard" / "test"
        train_until(rig, 1, 3)
        train_until(rig, 2, 5)
        assert len(list(folder.iterdir())) == 2
        shutil.rmtree(rig.work / "reports")
        rig.no_nodes_from(STEPS)
        assert rig.wait(rig.start_trainer(3), 3) == exit_codes.OK
        assert len(list(folder.iterdir())) == 2
        found = reader.EventAccumulator(str(folder)).Reload()
        rows = read_metrics(rig.store)
    scalars = {(one.step, round(one.value, 5)) for one in found.Scalars("train/reward")}
    assert scalars == {(row.step, round(row.values["reward"], 5)) for row in rows}
    assert [one.step for one in found.Scalars("train/reward")] == list(range(1, STEPS + 1))
    notes = [one.tensor_proto.string_val[0].decode() for one in found.Tensors("grpo-orch/text_summary")]
    assert len(notes) == 1
    assert notes[0].startswith("Trainer ")
    assert notes[0].endswith("of timeline 0")
