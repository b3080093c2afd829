"""What works on the simulated machines: trainers with their uploaders, and the gateways beside them.

A stand-in: no token is made and no tensor stored. It keeps the promises of the real ones towards the store, which
are tested where those are: a trainer begins at the newest checkpoint of its line, stops when it meets a newer
trainer or timeline, and counts as done only what is stored; the uploader lists a checkpoint in the catalog and
applies the production's retention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from checkpoint.records import documents, metrics
from checkpoint.records.documents import GatewayAddress
from checkpoint.store.errors import StoreUnavailable
from checkpoint.stream.catalog import Checkpoint, Revision
from orchestrator.simulate.cloud import EPOCH_S, Box, SimulatedCloud
from policies.control.rollback.choice import choose_start
from policies.detect.divergence import Health, Verdict
from policies.ledger.retention import RetentionRules, StoredCheckpoint, keep_before, keep_since, versions_to_retire
from policies.model import exit_codes
from policies.model.spec import CheckpointsSpec, RunSpec, generates_itself
from policies.model.timelines import Fork
from policies.model.vocabulary import PolicyVersion, Role
from policies.serving.gateway_status import GatewayStatus, MemberStatus
from policies.tick.snapshot import OWN_GENERATION, Trainer

TOKENS_A_STEP = 1e6

Trips = Mapping[int, tuple[int, int]]  # by timeline: the step at which its guard trips, and the onset


class Work:
    """All work of a run.

    Args:
        cloud: its machines.
        spec: the run's.
        max_steps: at which it is done.
        trips: where its timelines diverge.
        check: called with what must hold, and what is wrong otherwise.
        logs: trainers write the rows by which steps are measured.
    """

    def __init__(
        self,
        cloud: SimulatedCloud,
        spec: RunSpec,
        max_steps: int,
        trips: Trips,
        check: Callable[[bool, str], None],
        *,
        logs: bool,
    ) -> None:
        self._cloud, self._spec, self._check = cloud, spec, check
        self.max_steps, self.trips, self._logs = max_steps, trips, logs
        self.listed: tuple[PolicyVersion, ...] = ()  # in the catalog
        self.ever: set[PolicyVersion] = set()  # that was
        self.kept: dict[int, int] = {}  # by timeline: the newest step that no machine's loss has taken back
        self.stepped: list[str] = []  # trainers that have made a step with the store in reach, in this moment
        self.made_steps = 0.0  # by all, also those that were made again
        cloud.on_loss = self.forget

    @property
    def stored_step(self) -> int:
        """The newest step of the newest timeline's that is stored."""
        return max((at.step for at in self.listed if at.timeline == self.listed[-1].timeline), default=0)

    def pass_time(self, dt_s: float) -> None:
        self.stepped.clear()
        for box in list(self._cloud.boxes.values()):
            found_again = box.cut_off_s > 0 and not box.is_cut_off
            box.cut_off_s = box.cut_off_s + dt_s if box.is_cut_off else 0.0
            if found_again:
                continue  # its gateway may write before its trainer and its uploader try again
            with contextlib.suppress(StoreUnavailable):
                if not box.gone:
                    self._upload(box)
                if box.role is Role.TRAINER and box.at_work(self._cloud.time_s):
                    self._train(box, dt_s)
            if box.exit_code is not None and box.store.writes:
                box.reported_code = box.exit_code
        self._check(len(self.stepped) <= 1, f"two trainers act: {self.stepped}")
        self._gateways()

    def forget(self, box: Box) -> None:
        """A machine is lost, with what it had not stored."""
        if box.role is Role.TRAINER:
            self.kept[box.timeline] = max(
                (at.step for at in self.listed if at.timeline == box.timeline), default=0
            )

    def _upload(self, box: Box) -> None:
        """The uploader, which outlives the trainer."""
        while box.spool and box.store.writes:
            known = documents.read_forks(box.store)
            wanted = partial(self._listed, new=box.spool[0], known=known)
            self.listed = tuple(one.at for one in box.catalog.change(self._cloud.time_s, wanted).checkpoints)
            self.ever.add(box.spool.pop(0))

    def _listed(self, present: Revision, *, new: PolicyVersion, known: Sequence[Fork]) -> Revision:
        """The catalog with another checkpoint, and without what retention lets go."""
        ones = {one.at: one for one in present.checkpoints}
        ones[new] = Checkpoint(str(new), f"checkpoints/{new}", "", self._cloud.time_s, 1)
        stays = stored(list(ones), new, self._verdict(new), known, self._spec.checkpoints)
        return replace(present, checkpoints=[ones[at] for at in stays])

    def _train(self, box: Box, dt_s: float) -> None:
        beat = None
        with contextlib.suppress(StoreUnavailable):
            beat = documents.TRAINER.read(box.store)
            newest = documents.newest_timeline(box.store)
            if newest > box.timeline or (beat is not None and beat.precedence > box.precedence):
                box.exit_code = exit_codes.FENCED
                return
        if box.step < 0 and not self._begin(box):
            return
        leaving = self._leaves(box)
        trip, _ = self.trips.get(box.timeline, (self.max_steps + 1, 0))
        box.generates_itself = False
        works = leaving or box.step >= trip or self._step(box, dt_s)
        step = int(box.step)
        self._seal(box, step, whole=leaving or step >= self.max_steps, tripped=step >= trip)
        activity = "done" if step >= self.max_steps and not box.spool else "training" if works else "waiting"
        activity = OWN_GENERATION if works and activity == "training" and box.generates_itself else activity
        activity = "diverged" if step >= trip and not box.spool else activity
        self._write_heartbeat(box, activity, leaving=leaving)
        if activity == "diverged":
            box.exit_code = exit_codes.DIVERGED
        elif activity == "done":
            box.exit_code = exit_codes.OK
        elif leaving and not box.spool:
            box.exit_code = exit_codes.STOPPED

    def _begin(self, box: Box) -> bool:
        """Take up the newest checkpoint of its line; whether it could."""
        if not box.store.writes or box.spool:
            return False  # its first beat has to be written, and what was sealed here to be stored
        known = documents.read_forks(box.store)
        there = [one.at for one in box.catalog.newest().checkpoints]
        found = choose_start(there, known, box.timeline, None)
        begins = found.step if found is not None else 0
        others = [one for one in self._cloud.of(Role.TRAINER) if one is not box and not one.gone]
        if any(one.notice or one.spool for one in others):
            self.kept[box.timeline] = begins  # the one before it may have sealed another at this moment
        least = self.kept.get(box.timeline, 0)
        self._check(begins >= least, f"steps are lost on timeline {box.timeline}: {least} -> {begins}")
        box.step = float(begins)
        return True

    def _step(self, box: Box, dt_s: float) -> bool:
        """Make a part of a step; whether it could, for which it needs a rollout node, or to have been without one
        for so long that it generates by itself."""
        physics = self._cloud.physics
        working = [one for one in self._cloud.of(Role.ROLLOUT) if one.at_work(self._cloud.time_s)]
        nodes = 1 if generates_itself(self._spec) else len(working)
        speed = nodes if generates_itself(self._spec) else sum(one.speed for one in working)
        box.alone_s = 0.0 if nodes else box.alone_s + dt_s
        after_s = self._spec.rollout.own_generation_after_s
        if nodes == 0 and after_s is not None and box.alone_s >= after_s:
            box.generates_itself, speed = True, 1 / physics.own_slower
        if speed == 0 or box.step - self.stored_step >= physics.behind_steps:
            return speed > 0
        before = box.step
        box.step = min(float(self.max_steps), box.step + dt_s / physics.step_s(speed))
        generating = physics.generation_node_s / speed / physics.step_s(speed)  # a share of the time
        box.generated_s += dt_s * generating
        box.generated_node_s += dt_s * generating * nodes
        box.own_s += dt_s * generating * box.generates_itself
        self.made_steps += box.step - before
        if self._logs and int(box.step) > int(before):
            self._log(box)
        if box.store.writes:
            self.stepped.append(box.node)
        return True

    def _log(self, box: Box) -> None:
        """The row of the step that has ended."""
        values = {
            metrics.GENERATE_S: box.generated_s,
            metrics.GENERATE_NODE_S: box.generated_node_s,
            metrics.TOKENS: TOKENS_A_STEP,
        }
        if box.own_s:
            values[metrics.OWN_GENERATE_S] = box.own_s
        box.generated_s = box.generated_node_s = box.own_s = 0.0
        at_s = EPOCH_S + self._cloud.time_s
        box.log.append(metrics.Row(box.timeline, int(box.step), at_s, box.attempt, values))

    def _seal(self, box: Box, step: int, *, whole: bool, tripped: bool) -> None:
        """Save, at each `save_steps`; at the end what there is. Nothing from a trip on."""
        saved = step if whole else step // self._cloud.physics.save_steps * self._cloud.physics.save_steps
        newest = box.sealed.step if box.sealed is not None and box.sealed.timeline == box.timeline else 0
        if tripped or saved <= max(newest, 0) or PolicyVersion(box.timeline, saved) in self.listed:
            return
        box.sealed = PolicyVersion(box.timeline, saved)
        box.spool.append(box.sealed)
        self.kept[box.timeline] = max(self.kept.get(box.timeline, 0), saved)

    def _leaves(self, box: Box) -> bool:
        if box.notice and box.role is Role.TRAINER:
            return True
        try:
            return documents.is_asked_to_stop(box.store, box.node, box.attempt)
        except StoreUnavailable:
            return False

    def _write_heartbeat(self, box: Box, activity: str, *, leaving: bool) -> None:
        at = EPOCH_S + self._cloud.time_s
        beat = Trainer(box.node, box.attempt, box.timeline, int(box.step), self.max_steps, activity, at)
        verdict = self._verdict(PolicyVersion(box.timeline, int(box.step)))
        stored_step = self.stored_step or None
        beat = replace(beat, verdict=verdict, leaving=leaving, stored_step=stored_step)
        documents.TRAINER.write(box.store, beat)

    def _verdict(self, at: PolicyVersion) -> Verdict:
        trip, onset = self.trips.get(at.timeline, (self.max_steps + 1, self.max_steps + 1))
        if at.step < onset:
            return Verdict(step=at.step)
        if at.step < trip:
            return Verdict(Health.WATCH, at.step, onset, None, ("KL 9",))
        return Verdict(Health.TRIPPED, at.step, onset, trip, ("KL 9",))

    def _gateways(self) -> None:
        """One beside each trainer, from when its machine is up."""
        now_s = self._cloud.time_s
        serving = [one for one in self._cloud.of(Role.ROLLOUT) if one.at_work(now_s)]
        for box in [one for one in self._cloud.of(Role.TRAINER) if one.is_up(now_s) and one.exit_code is None]:
            boot_id, policy = f"{box.node}.{box.attempt}", f"{box.timeline}-{max(0, int(box.step))}"
            members = [
                MemberStatus(one.node, "b", "10.0.0.2:1", policy, True, one.notice, 4, 0.1) for one in serving
            ]
            box.writes += 1
            up_s = now_s - max(box.up_at_s, box.works_at_s - box.works_in_s)
            status = GatewayStatus(boot_id, policy, members, seq=box.writes, up_s=up_s)
            with contextlib.suppress(StoreUnavailable):
                if box.listens_as != boot_id:
                    documents.gateway(box.precedence).write(
                        box.store, GatewayAddress("http://10.0.0.1:1", boot_id)
                    )
                    box.listens_as = boot_id
                documents.members(box.precedence).write(box.store, status)


# The simulated world's run store: what it keeps of the checkpoints that its trainer saves.


def stored(
    listed: Sequence[PolicyVersion],
    new: PolicyVersion,
    verdict: Verdict,
    forks: Sequence[Fork],
    spec: CheckpointsSpec,
    logging_steps: int = 1,
) -> list[PolicyVersion]:
    """Return what is listed once `new` is, and retention was applied as the uploader does: with what the trainer's
    guard said when it sealed `new`, and the forks that are in the store after its listing."""
    held = sorted({*listed, new})
    rules = RetentionRules(
        spec.keep_last,
        spec.keep_every_steps,
        keep_before(new.step, verdict, logging_steps),
        keep_since(new.step, logging_steps),
    )
    gone = versions_to_retire([StoredCheckpoint(one) for one in held], forks, rules)
    return [one for one in held if one not in gone]
