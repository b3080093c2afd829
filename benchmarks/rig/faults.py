"""What becomes of requests under way when one of three servers goes: `kill`, `stop` and `drop`.

kill: server and agent are killed. stop: the server is stopped, its agent is not. drop: the machine of both is cut
off, packets vanish. Only our gateway has agents.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.rig.gateway.balancers import Running, Stand, System
from benchmarks.rig.gateway.load import Call, make_stand, start
from benchmarks.rig.gateway.namespace import namespace, vanish

FAULTS = ("kill", "stop", "drop")
HOSTS = ("127.0.0.11", "127.0.0.12", "127.0.0.13")
REQUESTS, TOKENS, STEP_US = 64, 200, 20_000  # a token an event: all that was made has been sent
IDEAL_S = TOKENS * STEP_US / 1e6
STRIKE_S = IDEAL_S / 2
PATIENCE_S = 10.0  # after the time that an undisturbed run takes
ARRIVE_S = 0.05  # for packets on their way


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fault did. `tokens_regenerated` were made and are in no whole answer: they were made again or would
    have to be. `seconds_to_recover` is what it took longer than an undisturbed run, None if some never came."""

    failed: int
    tokens_regenerated: int
    seconds_to_recover: float | None


def measure(fault: str, systems: Sequence[System], folder: Path) -> list[Outcome | str]:
    """Strike all systems at the same time, each in a world of its own. A text says why one could not be."""
    folder.mkdir()
    with ThreadPoolExecutor(len(systems)) as pool:
        return list(pool.map(partial(_measure_one, fault, folder), range(len(systems)), systems))


def _measure_one(fault: str, folder: Path, number: int, system: System) -> Outcome | str:
    try:
        with namespace(f"bench-gateway-{number}"), ExitStack() as exits:
            stand = make_stand(folder / str(number), HOSTS, exits, step_us=STEP_US, pinned=False)
            return _outcome(fault, system, stand, start(system, stand))
    except RuntimeError as error:
        return str(error)


def _outcome(fault: str, system: System, stand: Stand, running: Running) -> Outcome:
    before = sum(fake.counts().made for fake in stand.fakes)
    asks = system.asks(REQUESTS, TOKENS)
    call = Call(stand, system, running, asks, REQUESTS, IDEAL_S + PATIENCE_S)
    time.sleep(max(0.0, call.begun_s + STRIKE_S - time.monotonic()))
    strike(fault, stand, running)
    answers = call.answers()
    made = sum(fake.counts().made for fake in stand.fakes) - before
    right = [answer for answer in answers if answer.right]
    failed = len(answers) - len(right)
    took_s = max((answer.done_s or 0.0 for answer in answers), default=0.0) - call.begun_s
    lost = made - sum(answer.tokens for answer in right)
    return Outcome(failed, lost, None if failed else max(0.0, took_s - IDEAL_S))


def strike(fault: str, stand: Stand, running: Running) -> None:
    """Do it to the last server. It makes nothing after that, and what it sent has arrived: counts are exact."""
    fake = stand.fakes[-1]
    agents = [process.pid for process in running.agents[-1:]]
    if fault == "kill":
        for pid in [fake.process.pid, *agents]:
            os.kill(pid, signal.SIGKILL)
        return
    os.kill(fake.process.pid, signal.SIGSTOP)
    if fault == "drop":
        time.sleep(ARRIVE_S)
        vanish(fake.host)
