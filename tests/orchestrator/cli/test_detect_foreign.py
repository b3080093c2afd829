"""`detect` on logs of other frameworks: names, nulls, records without steps, any content."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.orchestrator.traces.read import NotATrace, read_traces
from tests.rigs.command_line import Answer, Cli

FOREIGN = Path(__file__).parent / "foreign_logs"
Detect = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def detect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grpo_orch: Cli) -> Detect:
    monkeypatch.chdir(tmp_path)
    return lambda *words: json.loads(Answer(*grpo_orch("detect", *map(str, words), "-o", "json")).out)


@pytest.mark.parametrize("name", sorted(path.stem for path in FOREIGN.glob("names-*")))
def test_names_of_other_frameworks_are_recognised(name: str, detect: Detect) -> None:
    [found] = detect(FOREIGN / f"{name}.jsonl")
    assert found["tripped"]
    assert {"kl", "reward", "grad_norm"} <= found["columns"].keys()
    assert (found["unit"], found["target_step"]) == ("step", 27)


@pytest.mark.parametrize("name", ["loss-null", "kl-null", "gradnorm-null", "kl-and-gradnull", "wandb-tojson-nan"])
def test_columns_that_were_never_logged_do_not_trip(name: str, detect: Detect) -> None:
    [found] = detect(FOREIGN / f"{name}.jsonl")
    assert found["health"] == "healthy"


def test_bar_total_numbers_records_written_in_blocks(detect: Detect) -> None:
    [found] = detect(FOREIGN / "collapsed-in-blocks.log")
    assert (found["points"], found["unit"]) == (40, "step")
    assert found["trip_step"] % 5 == 0
    assert 0 < found["target_step"] < found["onset_step"] < found["trip_step"] <= 100


def test_log_without_steps_counts_records_and_names_no_target(detect: Detect) -> None:
    rows = [{"kl": 0.01 if at < 60 else math.exp(at - 60), "reward": 0.5} for at in range(80)]
    Path("log").write_text("".join(f"{row}\n" for row in rows))
    [found] = detect("log")
    assert (found["tripped"], found["unit"], found["target_step"]) == (True, "record", None)
    assert "record" in found["evidence"][0]


def test_lists_of_rewards_are_averaged(detect: Detect) -> None:
    rows = [{"step": at, "reward": [0.0, 1.0, 0.5], "kl": 0.01} for at in range(1, 31)]
    Path("log").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    [found] = detect("log")
    assert found["looked_at"]["reward"] == {"points": 30, "start": 0.5, "end": 0.5}


def test_wandb_run_file_is_refused_with_the_command_that_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "run-abc.wandb"
    file.write_bytes(b":W&B\xbe\xee\x00" + bytes(100))
    with pytest.raises(NotATrace, match=r"wandb\.Api\(\)\.run\('ENTITY/PROJECT/RUN'\)"):
        read_traces(file)


def test_message_for_no_metrics_lists_the_columns(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"step": 1, "speed": 3.0, "wattage": 4}\n' * 3)
    with pytest.raises(NotATrace, match="columns seen: speed, wattage;"):
        read_traces(file)


def test_reader_that_raises_costs_its_file_alone(detect: Detect, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> Any:
        if path.name == "bad":
            raise KeyError("column")
        return read_traces(path)

    monkeypatch.setattr("grpo_orch.orchestrator.cli.detect.read_traces", broken)
    Path("bad").write_text("x")
    bad, good = detect("bad", FOREIGN / "names-art.jsonl")
    assert bad["error"] == "cannot be read: KeyError: 'column'"
    assert good["tripped"]
