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
from grpo_orch.orchestrator.simulate.simulated_cloud import EPOCH_S, SimulatedCloud, SimulatedMachine
from grpo_orch.policies.control.rollback import newest_before
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
from grpo_orch.policies.tick.snapshot import Trainer

TOKENS_PER_STEP = 1e6

Trips = Mapping[int, tuple[int, int]]  # by timeline: the step at which its detector trips, and the onset


class Work:
    """The work on all machines of a run.

    Args:
        cloud: the run's machines.
        spec: the run's spec.
        max_steps: the last step.
        check: called with an invariant, and the error message if it is false.
        logs: write the metrics from which steps are measured.
    """

    def __init__(
        self,
        cloud: SimulatedCloud,
        spec: RunSpec,
        max_steps: int,
        check: Callable[[bool, str], None],
        *,
        logs: bool,
    ) -> None:
        self._cloud, self._spec, self._check = cloud, spec, check
        self.max_steps, self._logs = max_steps, logs
        self.trips: Trips = {}
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
        for machine in list(self._cloud.nodes.values()):
            is_reconnected = machine.cut_off_s > 0 and not machine.is_cut_off
            machine.cut_off_s = machine.cut_off_s + dt_s if machine.is_cut_off else 0.0
            if is_reconnected:
                continue  # the gateway may write before the trainer and the uploader retry
            with contextlib.suppress(StoreUnavailable):
                if not machine.gone:
                    self._upload(machine)
                if machine.role is Role.TRAINER and machine.is_working(self._cloud.time_s):
                    self._train(machine, dt_s)
            if machine.exit_code is not None and machine.store.writes:
                machine.reported_code = machine.exit_code
        self._check(len(self.stepped) <= 1, f"two trainers act: {self.stepped}")
        self._gateways()

    def forget(self, machine: SimulatedMachine) -> None:
        """Record the loss of a machine and its unstored checkpoints."""
        if machine.role is Role.TRAINER:
            self.safe_steps[machine.timeline] = max(
                (at.step for at in self.listed if at.timeline == machine.timeline), default=0
            )

    def _upload(self, machine: SimulatedMachine) -> None:
        """Run the uploader, which outlives the trainer."""
        while machine.spool and machine.store.writes:
            forks = documents.read_forks(machine.store)
            add = partial(self._add_checkpoint, new=machine.spool[0], forks=forks)
            revision = machine.catalog.change(self._cloud.time_s, add)
            self.listed = tuple(checkpoint.at for checkpoint in revision.checkpoints)
            self.ever_listed.add(machine.spool.pop(0))

    def _add_checkpoint(self, revision: Revision, *, new: PolicyVersion, forks: Sequence[Fork]) -> Revision:
        """Return the catalog with another checkpoint, after retention."""
        checkpoints = {checkpoint.at: checkpoint for checkpoint in revision.checkpoints}
        checkpoints[new] = Checkpoint(str(new), f"checkpoints/{new}", "", self._cloud.time_s, 1)
        retained = retain(list(checkpoints), new, self._verdict(new), forks, self._spec.checkpoints)
        return replace(revision, checkpoints=[checkpoints[at] for at in retained])

    def _train(self, machine: SimulatedMachine, dt_s: float) -> None:
        with contextlib.suppress(StoreUnavailable):
            heartbeat = documents.TRAINER.read(machine.store)
            newest = documents.newest_timeline(machine.store)
            if newest > machine.timeline or (heartbeat is not None and heartbeat.precedence > machine.precedence):
                machine.exit_code = exit_codes.FENCED
                return
        if machine.step < 0 and not self._begin(machine):
            return
        is_leaving = self._is_leaving(machine)
        trip, _ = self.trips.get(machine.timeline, (self.max_steps + 1, 0))
        makes_progress = is_leaving or machine.step >= trip or self._step(machine, dt_s)
        step = int(machine.step)
        self._seal(machine, step, is_final=is_leaving or step >= self.max_steps, is_tripped=step >= trip)
        activity = "training" if makes_progress else "waiting"
        if step >= self.max_steps and not machine.spool:
            activity = "done"
        if step >= trip and not machine.spool:
            activity = "diverged"
        self._write_heartbeat(machine, activity, is_leaving=is_leaving)
        if activity == "diverged":
            machine.exit_code = exit_codes.DIVERGED
        elif activity == "done":
            machine.exit_code = exit_codes.OK
        elif is_leaving and not machine.spool:
            machine.exit_code = exit_codes.STOPPED

    def _begin(self, machine: SimulatedMachine) -> bool:
        """Start at the newest checkpoint of its timeline's ancestry. Returns whether it could."""
        if not machine.store.writes or machine.spool:
            return False  # it must first write a heartbeat and store the checkpoints in its spool
        forks = documents.read_forks(machine.store)
        checkpoints = [checkpoint.at for checkpoint in machine.catalog.newest().checkpoints]
        start = newest_before(checkpoints, forks, machine.timeline, None)
        start_step = start.step if start is not None else 0
        others = [other for other in self._cloud.of(Role.TRAINER) if other is not machine and not other.gone]
        if any(other.notice or other.spool for other in others):
            # The previous trainer may have sealed another checkpoint just now.
            self.safe_steps[machine.timeline] = start_step
        safe_step = self.safe_steps.get(machine.timeline, 0)
        message = f"timeline {machine.timeline} restarts at step {start_step}, but step {safe_step} was safe"
        self._check(start_step >= safe_step, message)
        machine.step = float(start_step)
        return True

    def _step(self, machine: SimulatedMachine, dt_s: float) -> bool:
        """Make a part of a step. Returns whether it could: without rollout nodes it waits."""
        physics = self._cloud.physics
        working = [node for node in self._cloud.of(Role.ROLLOUT) if node.is_working(self._cloud.time_s)]
        nodes = 1 if generates_itself(self._spec) else len(working)
        speed = nodes if generates_itself(self._spec) else sum(node.speed for node in working)
        if speed == 0 or machine.step - self.stored_step >= physics.behind_steps:
            return speed > 0
        before = machine.step
        machine.step = min(float(self.max_steps), machine.step + dt_s / physics.step_s(speed))
        generating_share = physics.generation_node_s / speed / physics.step_s(speed)
        machine.generated_s += dt_s * generating_share
        machine.generated_node_s += dt_s * generating_share * nodes
        self.made_steps += machine.step - before
        if self._logs and int(machine.step) > int(before):
            self._log(machine)
        if machine.store.writes:
            self.stepped.append(machine.node)
        return True

    def _log(self, machine: SimulatedMachine) -> None:
        """Log the metrics of the finished step."""
        values = {
            metrics.GENERATE_S: machine.generated_s,
            metrics.GENERATE_NODE_S: machine.generated_node_s,
            metrics.TOKENS: TOKENS_PER_STEP,
        }
        machine.generated_s = machine.generated_node_s = 0.0
        at_s = EPOCH_S + self._cloud.time_s
        machine.log.append(metrics.MetricsRow(machine.timeline, int(machine.step), at_s, machine.attempt, values))

    def _seal(self, machine: SimulatedMachine, step: int, *, is_final: bool, is_tripped: bool) -> None:
        """Save a checkpoint every `save_steps` and at the end, but none after a trip."""
        saved = step if is_final else step // self._cloud.physics.save_steps * self._cloud.physics.save_steps
        newest = (
            machine.sealed.step
            if machine.sealed is not None and machine.sealed.timeline == machine.timeline
            else 0
        )
        if is_tripped or saved <= max(newest, 0) or PolicyVersion(machine.timeline, saved) in self.listed:
            return
        machine.sealed = PolicyVersion(machine.timeline, saved)
        machine.spool.append(machine.sealed)
        self.safe_steps[machine.timeline] = max(self.safe_steps.get(machine.timeline, 0), saved)

    def _is_leaving(self, machine: SimulatedMachine) -> bool:
        if machine.notice and machine.role is Role.TRAINER:
            return True
        try:
            return documents.is_stop_requested(machine.store, machine.node, machine.attempt)
        except StoreUnavailable:
            return False

    def _write_heartbeat(self, machine: SimulatedMachine, activity: str, *, is_leaving: bool) -> None:
        at_s = EPOCH_S + self._cloud.time_s
        heartbeat = Trainer(
            machine.node, machine.attempt, machine.timeline, int(machine.step), self.max_steps, activity, at_s
        )
        verdict = self._verdict(PolicyVersion(machine.timeline, int(machine.step)))
        stored_step = self.stored_step or None
        heartbeat = replace(heartbeat, verdict=verdict, leaving=is_leaving, stored_step=stored_step)
        documents.TRAINER.write(machine.store, heartbeat)

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
        for machine in self._cloud.of(Role.TRAINER):
            if not machine.is_up(now_s) or machine.exit_code is not None:
                continue
            boot_id, policy = (
                f"{machine.node}.{machine.attempt}",
                f"{machine.timeline}-{max(0, int(machine.step))}",
            )
            members = [
                MemberStatus(node.node, "b", "10.0.0.2:1", policy, True, node.notice, 4, 0.1) for node in serving
            ]
            machine.writes += 1
            up_s = now_s - max(machine.up_at_s, machine.works_at_s - machine.works_in_s)
            status = GatewayStatus(boot_id, policy, members, seq=machine.writes, up_s=up_s)
            with contextlib.suppress(StoreUnavailable):
                if machine.listens_as != boot_id:
                    documents.gateway(machine.precedence).write(
                        machine.store, GatewayAddress("http://10.0.0.1:1", boot_id)
                    )
                    machine.listens_as = boot_id
                documents.members(machine.precedence).write(machine.store, status)


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
