"""`grpo-orch eval`, whole: after a tiny run base and checkpoint are evaluated by two vLLM servers; then the base
once more, and a server's machine is killed in the middle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from grpo_orch.checkpoint.records import documents, rollouts
from grpo_orch.checkpoint.records.evaluations import ScoredSample
from grpo_orch.checkpoint.records.rollouts import Rollout
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.orchestrator.clouds.local import marked_processes
from grpo_orch.policies.model import exit_codes
from tests.e2e.harness import Run, kill
from tests.e2e.tiny import RUN_TIMEOUT_S, finish, tiny_run

pytestmark = [pytest.mark.whole, pytest.mark.slow]

STEPS = 8
ROWS = 32
# Long completions, a few at a time: a node can be killed in the middle of them.
LONG: dict[str, Any] = {
    "max_completion_length": 200,
    "generation_kwargs": {"ignore_eos": True},
    "per_device_train_batch_size": 16,
}


def test_evaluation_on_two_nodes_survives_a_killed_node(tiny: Path, tmp_path: Path) -> None:
    changes = {**LONG, "max_steps": STEPS, "save_steps": STEPS, "eval_strategy": "no"}
    run = tiny_run(tmp_path / "run", tiny, replicas=2, **changes)
    with run.edited() as spec:
        spec["rollout"]["vllm"]["max-num-seqs"] = 4
    command = ("eval", run.url, "--dataset", str(tiny / "prompts.jsonl"), "--rows", f"{ROWS}", "-y")
    with run.up():
        finish(run)
        run.cli(*command, "--step", "7", code=exit_codes.USAGE)

        calm = json.loads(run.cli(*command, "-o", "json", timeout_s=RUN_TIMEOUT_S).stdout)
        assert (calm["problems"], list(calm["policies"])) == (ROWS, ["base", f"0-{STEPS}"])
        assert calm["difference"]["rewards"]["digit_share"]["low"] > 0, "training has taught what it was for"
        store = run.of(calm["store"])
        assert [len(one.completions) for one in generated(store)] == [ROWS, ROWS], "one batch for each policy"
        assert [one.pinned for one in Catalog(run.store, "test").newest().checkpoints] == [False]
        assert json.loads(run.cli(*command, "-o", "json").stdout) == calm, "it is shown again"
        assert run.json("eval", calm["store"]) == calm

        node, killed = base_with_a_kill(run, *command)
        (base,) = generated(killed)
        assert {one.node for one in base.completions} - {node}, "others went on with what it had"
        assert samples(killed, "base") == samples(store, "base")


def base_with_a_kill(run: Run, *command: str) -> tuple[str, Store]:
    """Evaluate the base, and kill the first node that serves; returns which it was, and the evaluation's store."""
    argv = [sys.executable, "-m", "grpo_orch", *command, "--base", "-o", "json"]
    with subprocess.Popen(argv, env=run.env, cwd=run.yaml.parent, stdout=subprocess.PIPE, text=True) as process:

        def store() -> Store:
            (found,) = [one for one in run.store.folders(layout.EVALUATIONS) if "/base-" in one]
            return run.of(f"{run.url}/{found}")

        run.until("its store", lambda: any("/base-" in one for one in run.store.folders(layout.EVALUATIONS)))
        run.until("requests", lambda: activity(store()) == "generating", RUN_TIMEOUT_S)
        run.until("a member", lambda: bool(members(store())), RUN_TIMEOUT_S)
        node = members(store())[0]
        home = Path(run.env["GRPO_ORCH_HOME"]) / documents.read_run(store()).run_id
        kill(marked_processes(home / "machines" / node))
        process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == 0, run.last_words()
    return node, store()


def activity(store: Store) -> str:
    beat = documents.TRAINER.read(store)
    return "" if beat is None else beat.activity


def members(store: Store) -> list[str]:
    """The nodes that the gateway has last said to serve."""
    status = documents.read_members(store)
    return [] if status is None else [one.node for one in status.members if one.policy is not None]


def generated(store: Store) -> list[Rollout]:
    """What came through the gateway, batch by batch."""
    found = (rollouts.read_rollout(store, entry.key) for entry in store.entries(layout.ROLLOUTS))
    return [one for one in found if one is not None]


def samples(store: Store, subject: str) -> list[ScoredSample]:
    return [
        msgspec.json.decode(line, type=ScoredSample)
        for line in store.get(layout.evaluated_samples(subject)).splitlines()
    ]
