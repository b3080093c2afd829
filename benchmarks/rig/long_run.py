"""A long run in a store, as daemon, trainer, uploader and gateway leave it: losses, refusals, two rollbacks.

Not known here: what a run's curves look like in truth. They rise, are noisy and diverge twice, so that there is
something to draw.
"""

from __future__ import annotations

import math
import random
import tempfile
from itertools import groupby
from pathlib import Path

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.metrics import (
    GENERATE_S,
    PUBLISH_S,
    REWARDS_S,
    STORE_S,
    TOKENS,
    TOKENS_DISCARDED,
    WAIT_S,
    MetricsRow,
    MetricsWriter,
)
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import transfer
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.checkpoint.stream.manifest import files_below
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import (
    Diverged,
    DivergenceSuspected,
    Event,
    FleetMoved,
    FleetSized,
    GatewayRestarted,
    JobExited,
    JobRestarted,
    MachineBought,
    NodeMoved,
    NodeRequested,
    PitfallFound,
    ProbationPassed,
    RollbackStarted,
    RunCreated,
    RunMoved,
    TimelineForked,
    TimelineResumed,
    TrainerFenced,
)
from grpo_orch.policies.model.pools import Pool
from grpo_orch.policies.model.spec import (
    Budget,
    Dataset,
    KlPolicy,
    PoliciesSpec,
    Replicas,
    RolloutSpec,
    RunSpec,
    TrainerSpec,
)
from grpo_orch.policies.model.timelines import Fork, Skipped, probation_until
from grpo_orch.policies.model.vocabulary import (
    Cause,
    Market,
    NodePhase,
    PolicyVersion,
    Refusal,
    Role,
    RunPhase,
    precedence_of,
    role_of,
)
from grpo_orch.policies.serving.gateway_status import GatewayStatus, MemberStatus
from grpo_orch.policies.serving.wire import EngineStats
from grpo_orch.policies.tick.snapshot import Trainer

TICK_S = 5.0  # what happens within one is one entry
LIFE_S = 12 * 3600.0  # of a spot machine, on average
POOLS = (
    Pool("aws", "us-east-1", "us-east-1b", "g5.12xlarge", "A10G:4", Market.SPOT),
    Pool("aws", "us-west-2", "us-west-2c", "g6.12xlarge", "L4:4", Market.SPOT),
    Pool("gcp", "us-central1", "us-central1-a", "g2-standard-48", "L4:4", Market.SPOT),
)
TRAINER = "trainer-0-i1"
EVIDENCE = (
    "KL 0.61, 14 times its calm level of 0.043",
    "reward 0.41, down from 0.74",
    "completions are cut at their limit: 38 %, up from 2 %",
)
TRIPS = (0.346, 0.723)  # of the way; each goes back by a fiftieth of it
CHANGES = ({"learning_rate": 5e-7}, {"learning_rate": 5e-7, "beta": 0.01})


class LongRun:
    """The run is in the store once this is made; `goes_on` adds to it.

    Args:
        url: of an empty store.
        steps: so far.
        nodes: rollout nodes.
        now_s: when the last step was made, seconds since the epoch.
        step_s: seconds of a step.
    """

    def __init__(self, url: str, steps: int, nodes: int, now_s: float, step_s: float = 32.0) -> None:
        self.store = Store(url)
        self.step, self._step_s, self._nodes = steps, step_s, nodes
        self._random = random.Random(7)
        self.began_s = now_s - steps * step_s
        self._metrics = MetricsWriter(self.store)
        self._journal = journal.Journal(self.store, "build-7/4242")
        self._forks = tuple(self._fork(number) for number in (1, 2))
        self._beats = 0
        self._create()
        self._write_journal()
        self._write_rows()
        self._save()
        self.beat()

    def goes_on(self) -> None:
        """One more step."""
        self.step += 1
        self._metrics.append(self._row(2, self.step))
        self.beat()

    def happens(self, *events: Event) -> None:
        """Something is journalled, right after the last step."""
        self._journal.append(self._at_s(self.step), events)

    def _at_s(self, step: float) -> float:
        return self.began_s + step * self._step_s

    def _trip(self, number: int) -> int:
        return int(TRIPS[number - 1] * self.step)

    def _fork(self, number: int) -> Fork:
        trip = self._trip(number)
        start = trip - max(2, self.step // 50)
        reason = f"diverged since step {trip - 1}: {EVIDENCE[0]}"
        skipped = (Skipped(number - 1, trip - 1, trip),)
        return Fork(number, f"{number - 1}-{start}", CHANGES[number - 1], skipped, reason, trip)

    def _create(self) -> None:
        spec = RunSpec(
            name="math-7b",
            storage=self.store.url,
            trainer=TrainerSpec(model="m", dataset=Dataset(path="d"), reward_funcs=("rewards.math",)),
            grpo={"learning_rate": 1e-6, "beta": 0.0, "max_steps": self.step * 6 // 5},
            rollout=RolloutSpec(replicas=Replicas(max=self._nodes)),
            policies=PoliciesSpec(kl=KlPolicy(limit=0.5)),
            budget=Budget(usd=250.0 * self._nodes),
        )
        documents.create_run(self.store, documents.RunRecord(1, "id", self.began_s, spec))

    def _write_journal(self) -> None:
        self._journal.take_over(self.began_s, "build-7", 4242, "up")
        told = [*self._run_events(), *self._timeline_events()]
        for slot in range(self._nodes):
            told += self._slot_events(slot)
        told.sort(key=lambda one: one[0])
        for _, tick in groupby(told, key=lambda one: one[0] // TICK_S):
            events = list(tick)
            self._journal.append(events[-1][0], tuple(event for _, event in events))
        at_s = self._at_s(self.step)
        lease = documents.Lease("build-7/4242", "another-host.invalid", 4242, "1", 1, at_s, 3600, at_s)
        documents.LEASE.write(self.store, lease)

    def _run_events(self) -> list[tuple[float, Event]]:
        at_s = self.began_s
        why = "a step is cheapest with them: 9 s of it no node shortens"
        return [
            (at_s, RunCreated("math-7b", "id")),
            (at_s + 1, NodeRequested(TRAINER, Role.TRAINER, "trainer-0", 1, Market.ON_DEMAND, "first")),
            (at_s + 60, NodeMoved(TRAINER, NodePhase.BOOTING, "the machine is up")),
            (at_s + 60, MachineBought(TRAINER, Market.ON_DEMAND, POOLS[0].zone_path, 31.2, 31.2)),
            (at_s + 200, NodeMoved(TRAINER, NodePhase.SERVING, "its first heartbeat")),
            (at_s + 200, RunMoved(RunPhase.TRAINING, "the trainer sent its first heartbeat")),
            (self._at_s(self.step * 0.2), FleetSized(self._nodes, max(1, self._nodes - 4), why)),
            (
                self._at_s(self.step * 0.9),
                PitfallFound("reward_spread", int(self.step * 0.9), "no group differs: 41 %"),
            ),
        ]

    def _timeline_events(self) -> list[tuple[float, Event]]:
        told: list[tuple[float, Event]] = []
        for fork in self._forks:
            trip, number = self._trip(fork.timeline), fork.timeline
            assert fork.start_at is not None
            start, at_s = fork.start_at.step, self._at_s(trip)
            passed = probation_until(trip, fork.start_at)
            restarted = JobRestarted(TRAINER, number + 1, f"continues with timeline {number}")
            told += [
                (self._at_s(trip - 1), DivergenceSuspected(number - 1, trip - 1, trip - 1, EVIDENCE[:1])),
                (at_s, JobExited(TRAINER, number, exit_codes.DIVERGED, trip)),
                (at_s, Diverged(number - 1, trip, trip - 1, EVIDENCE, "trainer")),
                (at_s, RollbackStarted(fork, Cause.DIVERGED, trip, fork.reason)),
                (at_s + 6, TimelineForked(number)),
                (at_s + 12, TrainerFenced(number)),
                (at_s + 12, restarted),
                (at_s + 18, GatewayRestarted(f"gateway-{number}")),
                (at_s + 18, TimelineResumed(number, start)),
                (at_s + 24, FleetMoved(number, f"{number}-{start}")),
                (self._at_s(passed) + 30, ProbationPassed(number, passed)),
            ]
            documents.write_fork(self.store, fork)
        return told

    def _slot_events(self, index: int) -> list[tuple[float, Event]]:
        """One slot's machines, one after another: some refused, most taken back, the last one at work."""
        chance, slot, end_s = self._random, f"rollout-{index}", self._at_s(self.step)
        told: list[tuple[float, Event]] = []
        at_s, number = self.began_s + 1, 0
        while at_s < end_s - 300:
            number += 1
            node = f"{slot}-i{number}"
            why = "first" if number == 1 else f"{slot}-i{number - 1} is gone"
            told.append((at_s, NodeRequested(node, Role.ROLLOUT, slot, number, Market.SPOT, why)))
            if chance.random() < 0.15:
                refused = NodeMoved(node, NodePhase.REFUSED, "no capacity in us-east-1b", Refusal.NO_CAPACITY)
                told.append((at_s + 20, refused))
                at_s += 120 + chance.random() * 600
                continue
            pool, price = chance.choice(POOLS), round(chance.uniform(0.9, 1.6), 3)
            boots_s, life_s = chance.uniform(30, 70), 120 + chance.expovariate(1 / LIFE_S)
            told += [
                (at_s + boots_s, NodeMoved(node, NodePhase.BOOTING, "the machine is up")),
                (at_s + boots_s, MachineBought(node, Market.SPOT, pool.zone_path, price, 3.67, pool)),
                (at_s + boots_s + 110, NodeMoved(node, NodePhase.SERVING, "it is in the membership")),
            ]
            lost_s = at_s + boots_s + 150 + life_s
            if lost_s >= end_s:
                break
            if chance.random() < 0.5:
                told.append((lost_s - 60, NodeMoved(node, NodePhase.DRAINING, "its cloud takes it back in 120 s")))
            told.append((lost_s, NodeMoved(node, NodePhase.GONE, "the cloud no longer has it")))
            at_s = lost_s + TICK_S
        return told

    def _write_rows(self) -> None:
        """As MetricsWriter leaves them, which writes an object anew at each of its hundred steps."""
        begins = [0, *(fork.start_at.step for fork in self._forks if fork.start_at is not None)]
        ends = [*(self._trip(fork.timeline) for fork in self._forks), self.step]
        for timeline, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            rows = [self._row(timeline, step) for step in range(begin + 1, end + 1)]
            for key, chunk in groupby(rows, key=lambda row: layout.metrics_chunk(row.timeline, row.step)):
                self.store.put(key, b"".join(to_json(row) + b"\n" for row in chunk))

    def _row(self, timeline: int, step: int) -> MetricsRow:
        noise, way = self._random.gauss, step / self.step
        over = step - self._trip(timeline + 1) if timeline < len(self._forks) else -self.step
        gone_wrong = math.exp(over / max(1.0, self.step / 400))  # 1 where it trips
        values = {
            "reward": 0.86 - 0.62 * math.exp(-3 * way) - 0.4 * gone_wrong + noise(0, 0.03),
            "kl": 0.01 + 0.05 * way + 0.55 * gone_wrong + abs(noise(0, 0.006)),
            "loss": 0.02 * math.exp(-2 * way) + 0.05 * gone_wrong + noise(0, 0.004),
            TOKENS: 512 * (420 + 700 * way),
            TOKENS_DISCARDED: 9000.0 if self._random.random() < 0.02 else 0.0,
            WAIT_S: self._step_s * 8 * self._random.random() if self._random.random() < 0.01 else 0.0,
            GENERATE_S: self._step_s * (0.35 + 0.15 * way + abs(noise(0, 0.03))),
            REWARDS_S: self._step_s * (0.04 + abs(noise(0, 0.01))),
            PUBLISH_S: self._step_s * 0.07,
            STORE_S: self._step_s * 0.4 if step % 25 == 0 else 0.0,
        }
        if step % max(1, self.step // 80) == 0:
            values["eval_reward"] = 0.8 - 0.55 * math.exp(-3 * way) + noise(0, 0.012)
        late_s = 0.2 * self._step_s * timeline  # made again on a new timeline, after the old one's trip
        return MetricsRow(timeline, step, self._at_s(self._made_at(timeline, step)) + late_s, 1, values)

    def _made_at(self, timeline: int, step: int) -> float:
        """In steps' time: those made again are made within what was left until the next trip."""
        if timeline == 0:
            return step
        fork = self._forks[timeline - 1]
        begin, from_step = 0 if fork.start_at is None else fork.start_at.step, self._trip(timeline)
        end = self._trip(timeline + 1) if timeline < len(self._forks) else self.step
        return from_step + (step - begin) * (end - from_step) / (end - begin)

    def _save(self) -> None:
        catalog = Catalog(self.store, TRAINER)
        with tempfile.TemporaryDirectory() as name:
            for part in (0.2, 0.32, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98, 0.99, 1.0):
                step = int(part * self.step)
                timeline = sum(self._trip(fork.timeline) < step for fork in self._forks)
                (Path(name) / "weights.safetensors").write_bytes(self._random.randbytes(40_000))
                version = PolicyVersion(timeline, step)
                transfer.upload(self.store, catalog, files_below(Path(name)), version, self._at_s(step), {})
        catalog.pin(self._at_s(self.step), PolicyVersion(0, int(0.32 * self.step)), pinned=True)

    def beat(self) -> None:
        """The trainer's and the gateway's word."""
        self._beats += 1
        at_s, most = self._at_s(self.step), self.step * 6 // 5
        beat = Trainer(TRAINER, 3, 2, self.step, most, "generating", at_s, stored_step=self.step)
        documents.TRAINER.write(self.store, beat)
        by = precedence_of(2, TRAINER, 3)
        if self._beats == 1:
            documents.gateway(by).write(
                self.store, documents.GatewayAddress("https://trainer.invalid", "gateway-2")
            )
        documents.members(by).write(self.store, self._gateway())

    def _gateway(self) -> GatewayStatus:
        policy, up_s = f"2-{self.step}", self._beats * self._step_s
        members = []
        for node in sorted(self._serving()):
            chance = random.Random(node)
            running = 0 if chance.random() < 0.05 else chance.randint(4, 24)
            tokens = int(up_s * chance.uniform(700, 1300))
            word = EngineStats(running, chance.choice((0, 0, 0, 2, 7)), 0.4, 0, tokens)
            holds = policy if chance.random() < 0.9 else f"2-{self.step - 1}"
            serving = holds == policy
            members.append(MemberStatus(node, "b", "a", holds, serving, False, running, 0.4, engine=word))
        return GatewayStatus("gateway-2", policy, members, requests_waiting=3, seq=self._beats, up_s=up_s)

    def _serving(self) -> list[str]:
        state = journal.recover(self.store).state
        return [one.id for one in state.nodes.values() if role_of(one.id) is Role.ROLLOUT]
