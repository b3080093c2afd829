"""Simulated trainers with their uploaders and gateways.

They generate no tokens and store no tensors, but use the store as the real ones do (tested there). A trainer
starts at the newest checkpoint of its timeline's ancestry, stops when it finds a newer trainer or timeline, and is
done only when its last checkpoint is stored. The uploader adds checkpoints to the catalog and applies production's
retention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from grpo_orch.checkpoint.records import documents, metrics
from grpo_orch.checkpoint.records.documents import GatewayAddress
from grpo_orch.checkpoint.store.errors import StoreUnavailable
from grpo_orch.checkpoint.stream.catalog import Checkpoint, Revision
from grpo_orch.orchestrator.simulate.cloud import EPOCH_S, SimulatedMachine, SimulatedCloud
from grpo_orch.policies.control.rollback.choice import choose_start
from grpo_orch.policies.detect.divergence import Health, Verdict
from grpo_orch.policies.ledger.retention import (
    RetentionRules,
    StoredCheckpoint,
    keep_before,
    keep_since,
    versions_to_retire,
)
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.spec import CheckpointsSpec, RunSpec, generates_itself
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import PolicyVersion, Role
from grpo_orch.policies.serving.gateway_status import GatewayStatus, MemberStatus
from grpo_orch.policies.tick.snapshot import OWN_GENERATION, Trainer

TOKENS_PER_STEP = 1e6

Trips = Mapping[int, tuple[int, int]]  # by timeline: the step at which its detector trips, and the onset


class Work:
    """The work on all machines of a run.

    Args:
        cloud: the run's machines.
        spec: the run's spec.
        max_steps: the last step.
        trips: where the run's timelines diverge.
        check: called with an invariant, and the error message if it is false.
        logs: write the metrics from which steps are measured.
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
        self.ever_listed: set[PolicyVersion] = set()
        self.safe_steps: dict[int, int] = {}  # by timeline: the newest step that a restart must not lose
        self.stepped: list[str] = []  # trainers that made a step in this interval while connected to the store
        self.made_steps = 0.0  # by all trainers, including repeated steps
        cloud.on_loss = self.forget

    @property
    def stored_step(self) -> int:
        """Newest stored step of the newest timeline."""
        return max((at.step for at in self.listed if at.timeline == self.listed[-1].timeline), default=0)

    def pass_time(self, dt_s: float) -> None:
        self.stepped.clear()
        for box in list(self._cloud.boxes.values()):
            is_reconnected = box.cut_off_s > 0 and not box.is_cut_off
            box.cut_off_s = box.cut_off_s + dt_s if box.is_cut_off else 0.0
            if is_reconnected:
                continue  # the gateway may write before the trainer and the uploader retry
            with contextlib.suppress(StoreUnavailable):
                if not box.gone:
                    self._upload(box)
                if box.role is Role.TRAINER and box.is_working(self._cloud.time_s):
                    self._train(box, dt_s)
            if box.exit_code is not None and box.store.writes:
                box.reported_code = box.exit_code
        self._check(len(self.stepped) <= 1, f"two trainers act: {self.stepped}")
        self._gateways()

    def forget(self, box: SimulatedMachine) -> None:
        """Record the loss of a machine and its unstored checkpoints."""
        if box.role is Role.TRAINER:
            self.safe_steps[box.timeline] = max(
                (at.step for at in self.listed if at.timeline == box.timeline), default=0
            )

    def _upload(self, box: SimulatedMachine) -> None:
        """Run the uploader, which outlives the trainer."""
        while box.spool and box.store.writes:
            forks = documents.read_forks(box.store)
            add = partial(self._add_checkpoint, new=box.spool[0], forks=forks)
            revision = box.catalog.change(self._cloud.time_s, add)
            self.listed = tuple(checkpoint.at for checkpoint in revision.checkpoints)
            self.ever_listed.add(box.spool.pop(0))

    def _add_checkpoint(self, revision: Revision, *, new: PolicyVersion, forks: Sequence[Fork]) -> Revision:
        """Return the catalog with another checkpoint, after retention."""
        checkpoints = {checkpoint.at: checkpoint for checkpoint in revision.checkpoints}
        checkpoints[new] = Checkpoint(str(new), f"checkpoints/{new}", "", self._cloud.time_s, 1)
        retained = retain(list(checkpoints), new, self._verdict(new), forks, self._spec.checkpoints)
        return replace(revision, checkpoints=[checkpoints[at] for at in retained])

    def _train(self, box: SimulatedMachine, dt_s: float) -> None:
        with contextlib.suppress(StoreUnavailable):
            heartbeat = documents.TRAINER.read(box.store)
            newest = documents.newest_timeline(box.store)
            if newest > box.timeline or (heartbeat is not None and heartbeat.precedence > box.precedence):
                box.exit_code = exit_codes.FENCED
                return
        if box.step < 0 and not self._begin(box):
            return
        is_leaving = self._is_leaving(box)
        trip, _ = self.trips.get(box.timeline, (self.max_steps + 1, 0))
        box.generates_itself = False
        makes_progress = is_leaving or box.step >= trip or self._step(box, dt_s)
        step = int(box.step)
        self._seal(box, step, is_final=is_leaving or step >= self.max_steps, is_tripped=step >= trip)
        activity = "training" if makes_progress else "waiting"
        if makes_progress and box.generates_itself:
            activity = OWN_GENERATION
        if step >= self.max_steps and not box.spool:
            activity = "done"
        if step >= trip and not box.spool:
            activity = "diverged"
        self._write_heartbeat(box, activity, is_leaving=is_leaving)
        if activity == "diverged":
            box.exit_code = exit_codes.DIVERGED
        elif activity == "done":
            box.exit_code = exit_codes.OK
        elif is_leaving and not box.spool:
            box.exit_code = exit_codes.STOPPED

    def _begin(self, box: SimulatedMachine) -> bool:
        """Start at the newest checkpoint of its timeline's ancestry. Returns whether it could."""
        if not box.store.writes or box.spool:
            return False  # it must first write a heartbeat and store the checkpoints in its spool
        forks = documents.read_forks(box.store)
        checkpoints = [checkpoint.at for checkpoint in box.catalog.newest().checkpoints]
        start = choose_start(checkpoints, forks, box.timeline, None)
        start_step = start.step if start is not None else 0
        others = [other for other in self._cloud.of(Role.TRAINER) if other is not box and not other.gone]
        if any(other.notice or other.spool for other in others):
            # The previous trainer may have sealed another checkpoint just now.
            self.safe_steps[box.timeline] = start_step
        safe_step = self.safe_steps.get(box.timeline, 0)
        message = f"timeline {box.timeline} restarts at step {start_step}, but step {safe_step} was safe"
        self._check(start_step >= safe_step, message)
        box.step = float(start_step)
        return True

    def _step(self, box: SimulatedMachine, dt_s: float) -> bool:
        """Make a part of a step. Returns whether it could.

        It needs rollout nodes, or has been without them for so long that it generates itself.
        """
        physics = self._cloud.physics
        working = [node for node in self._cloud.of(Role.ROLLOUT) if node.is_working(self._cloud.time_s)]
        nodes = 1 if generates_itself(self._spec) else len(working)
        speed = nodes if generates_itself(self._spec) else sum(node.speed for node in working)
        box.alone_s = 0.0 if nodes else box.alone_s + dt_s
        after_s = self._spec.rollout.own_generation_after_s
        if nodes == 0 and after_s is not None and box.alone_s >= after_s:
            box.generates_itself, speed = True, 1 / physics.own_slower
        if speed == 0 or box.step - self.stored_step >= physics.behind_steps:
            return speed > 0
        before = box.step
        box.step = min(float(self.max_steps), box.step + dt_s / physics.step_s(speed))
        generating_share = physics.generation_node_s / speed / physics.step_s(speed)
        box.generated_s += dt_s * generating_share
        box.generated_node_s += dt_s * generating_share * nodes
        box.own_s += dt_s * generating_share * box.generates_itself
        self.made_steps += box.step - before
        if self._logs and int(box.step) > int(before):
            self._log(box)
        if box.store.writes:
            self.stepped.append(box.node)
        return True

    def _log(self, box: SimulatedMachine) -> None:
        """Log the metrics of the finished step."""
        values = {
            metrics.GENERATE_S: box.generated_s,
            metrics.GENERATE_NODE_S: box.generated_node_s,
            metrics.TOKENS: TOKENS_PER_STEP,
        }
        if box.own_s:
            values[metrics.OWN_GENERATE_S] = box.own_s
        box.generated_s = box.generated_node_s = box.own_s = 0.0
        at_s = EPOCH_S + self._cloud.time_s
        box.log.append(metrics.MetricsRow(box.timeline, int(box.step), at_s, box.attempt, values))

    def _seal(self, box: SimulatedMachine, step: int, *, is_final: bool, is_tripped: bool) -> None:
        """Save a checkpoint every `save_steps` and at the end, but none after a trip."""
        saved = step if is_final else step // self._cloud.physics.save_steps * self._cloud.physics.save_steps
        newest = box.sealed.step if box.sealed is not None and box.sealed.timeline == box.timeline else 0
        if is_tripped or saved <= max(newest, 0) or PolicyVersion(box.timeline, saved) in self.listed:
            return
        box.sealed = PolicyVersion(box.timeline, saved)
        box.spool.append(box.sealed)
        self.safe_steps[box.timeline] = max(self.safe_steps.get(box.timeline, 0), saved)

    def _is_leaving(self, box: SimulatedMachine) -> bool:
        if box.notice and box.role is Role.TRAINER:
            return True
        try:
            return documents.is_stop_requested(box.store, box.node, box.attempt)
        except StoreUnavailable:
            return False

    def _write_heartbeat(self, box: SimulatedMachine, activity: str, *, is_leaving: bool) -> None:
        at_s = EPOCH_S + self._cloud.time_s
        heartbeat = Trainer(box.node, box.attempt, box.timeline, int(box.step), self.max_steps, activity, at_s)
        verdict = self._verdict(PolicyVersion(box.timeline, int(box.step)))
        stored_step = self.stored_step or None
        heartbeat = replace(heartbeat, verdict=verdict, leaving=is_leaving, stored_step=stored_step)
        documents.TRAINER.write(box.store, heartbeat)

    def _verdict(self, at: PolicyVersion) -> Verdict:
        trip, onset = self.trips.get(at.timeline, (self.max_steps + 1, self.max_steps + 1))
        if at.step < onset:
            return Verdict(step=at.step)
        if at.step < trip:
            return Verdict(Health.WATCH, at.step, onset, None, ("KL 9",))
        return Verdict(Health.TRIPPED, at.step, onset, trip, ("KL 9",))

    def _gateways(self) -> None:
        """Run a gateway on each trainer's machine that is up."""
        now_s = self._cloud.time_s
        serving = [node for node in self._cloud.of(Role.ROLLOUT) if node.is_working(now_s)]
        for box in self._cloud.of(Role.TRAINER):
            if not box.is_up(now_s) or box.exit_code is not None:
                continue
            boot_id, policy = f"{box.node}.{box.attempt}", f"{box.timeline}-{max(0, int(box.step))}"
            members = [
                MemberStatus(node.node, "b", "10.0.0.2:1", policy, True, node.notice, 4, 0.1) for node in serving
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


# Retention in the simulated store.


def retain(
    listed: Sequence[PolicyVersion],
    new: PolicyVersion,
    verdict: Verdict,
    forks: Sequence[Fork],
    spec: CheckpointsSpec,
    logging_steps: int = 1,
) -> list[PolicyVersion]:
    """Return the checkpoints that are listed after adding `new` and applying retention, as the uploader does.

    Args:
        listed: the checkpoints before.
        new: the checkpoint to add.
        verdict: of the trainer's detector when it sealed `new`.
        forks: in the store after `new` was listed.
        spec: the run's `checkpoints`.
        logging_steps: steps between two rows of metrics.
    """
    held = sorted({*listed, new})
    rules = RetentionRules(
        spec.keep_last,
        spec.keep_every_steps,
        keep_before(new.step, verdict, logging_steps),
        keep_since(new.step, logging_steps),
    )
    retired = versions_to_retire([StoredCheckpoint(version) for version in held], forks, rules)
    return [version for version in held if version not in retired]
