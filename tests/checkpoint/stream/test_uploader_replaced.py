"""What of a spool still belongs to the run: not what a fork has abandoned, nor what a newer trainer makes again.
And what the uploader retires.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import write_fork
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream.catalog import Checkpoint
from grpo_orch.checkpoint.stream.spool import Seal
from grpo_orch.orchestrator.simulate.work import retain
from grpo_orch.policies.detect.divergence import Verdict
from grpo_orch.policies.ledger.retention import keep_before, keep_since
from grpo_orch.policies.model.spec import CheckpointsSpec
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.tick.snapshot import Trainer
from grpo_orch.tasks.machine.node_env import NodeEnv
from grpo_orch.tasks.machine.uploader import is_replaced, retention


@pytest.mark.parametrize(
    ("says", "forks", "beat", "version", "replaced"),
    [
        ("nobody has spoken yet", [], None, "0-30", False),
        ("the present trainer's", [], ("trainer-0-i1", 0), "0-30", False),
        ("of a trainer before it on this machine", [], ("trainer-0-i1", 1), "0-30", False),
        ("of a machine that was replaced", [], ("trainer-0-i2", 0), "0-30", True),
        ("left by a fork, before its trainer has begun", ["0-20"], ("trainer-0-i1", 0), "0-30", True),
        ("left by a fork, on the machine that goes on", ["0-20"], ("trainer-0-i1", 1), "0-30", True),
        ("what a fork began from", ["0-20"], ("trainer-0-i1", 0), "0-20", False),
        ("of the new timeline", ["0-20"], ("trainer-0-i1", 1), "1-30", False),
        ("of the second of three", ["0-20", "1-30"], ("trainer-0-i1", 1), "1-30", False),
        ("of one that the third has left", ["0-20", "0-10"], ("trainer-0-i1", 1), "1-30", True),
        ("of a run that began anew", [None], ("trainer-0-i1", 0), "0-20", True),
    ],
)
def test_replaced_checkpoints_by_forks_and_heartbeat(
    says: str, forks: list[str | None], beat: tuple[str, int] | None, version: str, replaced: bool, tmp_path: Path
) -> None:
    store = Store(f"file://{tmp_path}/store")
    for number, start in enumerate(forks, 1):
        write_fork(store, Fork(number, start))
    if beat is not None:
        node, timeline = beat
        documents.TRAINER.write(store, Trainer(node, 1, timeline, 0, 0, "training", 0.0))
    env = NodeEnv(store.url, "trainer-0-i1", "", 1, 0, str(tmp_path), "127.0.0.1")
    assert is_replaced(store, env, PolicyVersion.parse(version)) == replaced, says


def test_uploader_retires_as_the_simulated_store_does(tmp_path: Path) -> None:
    store, spec = Store(f"file://{tmp_path}/store"), CheckpointsSpec(keep_last=1)
    forks = (Fork(1, "0-300", from_step=330), Fork(2, "1-350", from_step=380))
    retire, numbers = retention(store, spec), [(0, 10, 330), (1, 310, 380), (2, 360, 600)]
    listed: list[PolicyVersion] = []
    for timeline, first, last in numbers:
        for fork in forks[timeline - 1 : timeline] if timeline else ():
            write_fork(store, fork)
        for step in range(first, last + 1, 10):
            at, verdict = PolicyVersion(timeline, step), Verdict(step=step)
            held = [Checkpoint(str(one), "", "", 0.0, 0) for one in sorted({*listed, at})]
            seal = Seal(str(at), 0.0, {}, {}, keep_before(step, verdict, 1), keep_since(step, 1))
            gone = set(retire(held, seal))
            listed = retain(listed, at, verdict, forks[:timeline], spec)
            assert [one.at for one in held if one.at not in gone] == listed
