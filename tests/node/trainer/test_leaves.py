"""A trainer that is told to end, in the middle of whatever it does, stores every step that it has taken.

What goes on from there ends in the same weights, bit for bit, as a run that nothing disturbed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.records import documents, metrics
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.tick.snapshot import Trainer
from grpo_orch.tasks.machine.spooling import find_spool
from tests.budget import HANG_S
from tests.node.trainer.rig import STATES, Rig, open_rig

NEVER = {"save_steps": 1000}  # but at the end: whatever is stored before, the leaving has stored
BESIDE = (0, 1, 9)


@dataclass(frozen=True)
class Case:
    """A run, and after how many completions it is told."""

    spec: dict[str, Any]
    told: range


CASES = {
    # In the middle of a batch, between two batches of a step, or in an evaluation, after which random numbers
    # must be as without it.
    "plain": Case(
        {
            "grpo": {
                **NEVER,
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "eval_steps": 3,
                "per_device_eval_batch_size": 8,
            },
            "evaluates": True,
        },
        range(18, 70),
    ),
    # The rest of a generation window is stored with the step, and with it the place in it.
    # So is a reference model that is synchronised as it goes.
    "window": Case(
        {
            "grpo": {
                **NEVER,
                "steps_per_generation": 2,
                "num_iterations": 2,
                "sync_ref_model": True,
                "ref_model_sync_steps": 1,
                "ref_model_mixup_alpha": 0.5,
            }
        },
        range(17, 32),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_told_to_stop_it_loses_no_step(name: str, tiny: Path, tmp_path: Path) -> None:
    case, seed = CASES[name], random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    after = random.Random(seed).choice(case.told)
    with open_rig(tmp_path / "calm", tiny, **case.spec) as calm:
        assert calm.wait(calm.start_trainer()) == exit_codes.OK
    with open_rig(tmp_path / "told", tiny, **case.spec) as told:
        trainer = told.start_trainer()
        ask = partial(documents.request_stop, told.store, "trainer-0-i1", 1, time.time())
        when_made(told, after, ask, then_hold=True)
        assert trainer.wait(HANG_S) == exit_codes.STOPPED, told.log().read_text()[-4000:]
        check_all_is_stored(told)
        beat = told.last_beat()
        assert (beat.activity, beat.leaving, beat.stored_step) == ("stopped", True, beat.step)
        told.uploader.kill()  # it ends with the machine's attempt
        told.uploader.wait()
        told.start_uploader()
        told.gateway.on_completion = lambda _: None
        assert told.wait(told.start_trainer(2), 2) == exit_codes.OK
        assert told.digests(*STATES) == calm.digests(*STATES)
    assert told.results() == calm.results()


def test_sigterm_to_the_machine_stores_what_it_has(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer, uploader and their supervisor, as a cloud starts them; the step is longer than anyone waits.

    The container is one of another job's, whose ranks are no affair of the trainer's.
    """
    with open_rig(tmp_path, tiny, grpo=NEVER) as rig:
        rig.uploader.kill()  # the machine brings its own, and a gateway, before which the stand-in goes
        rig.uploader.wait()
        rig.gateway.close()
        rig.gateway.open(BESIDE)
        for name, value in {"RANK": "3", "WORLD_SIZE": "8", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
        machine = rig.start_trainer(argv=[sys.executable, "-m", "grpo_orch.tasks.machine.trainer_machine"])
        rig.no_nodes_from(3)  # of which the step does not end
        try:
            rig.until("waiting", lambda: (beat := rig.beat()) is not None and waits(beat, step=3))
            machine.send_signal(signal.SIGTERM)
            assert machine.wait(HANG_S) == exit_codes.STOPPED, rig.log().read_text()[-4000:]
        finally:
            machine.kill()
            rig.gateway.members = 1
        check_all_is_stored(rig)


def test_a_notice_is_trained_through_as_far_as_it_lasts(tiny: Path, tmp_path: Path) -> None:
    with open_rig(tmp_path, tiny, grpo={**NEVER, "max_steps": 10_000}) as rig:
        trainer = rig.start_trainer()
        noticed_s: list[float] = []
        when_made(rig, 20, lambda: noticed_s.append(notice(rig.work, lasts_s=3)))
        assert trainer.wait(HANG_S) == exit_codes.STOPPED, rig.log().read_text()[-4000:]
        assert time.monotonic() - noticed_s[0] > 1.0, "half of the notice, for nothing is measured yet"
        check_all_is_stored(rig)
        assert find_spool(rig.work) is None


def waits(beat: Trainer, *, step: int) -> bool:
    return (beat.activity, beat.step) == ("waiting", step)


def notice(work: Path, *, lasts_s: int) -> float:
    """Give notice; returns when. However late the trainer looks, for it the notice has just come: one that is over
    by then would be none."""
    part, now_s = work / "notice.part", time.monotonic()
    part.write_text(str(lasts_s))
    os.utime(part, (time.time() + HANG_S,) * 2)
    part.rename(work / "notice")
    return now_s


def when_made(rig: Rig, count: int, then: Callable[[], object], *, then_hold: bool = False) -> None:
    """Do something once the gateway has made so many completions; returns then.

    With `then_hold` the next completion ends no sooner than the trainer has heard: within one look at the store it
    could take all the steps that are left.
    """
    told: list[bool] = []

    def made(number: int) -> None:
        if number >= count and not told:
            told.append(True)
            then()
        elif told and then_hold:
            rig.until("leaving", lambda: (beat := rig.beat()) is not None and beat.leaving)

    rig.gateway.on_completion = made
    rig.until("told", lambda: bool(told))


def check_all_is_stored(rig: Rig) -> None:
    """The newest checkpoint is of the last step that was taken, and there was one to lose."""
    taken = max(row.step for row in metrics.read_metrics(rig.store))
    assert taken >= 1
    assert rig.stored() == [PolicyVersion(0, taken)]
