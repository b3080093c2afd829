"""The run's lifecycle: commands, first heartbeat, exits of the nodes' work, parking, the stop and the end."""

from __future__ import annotations

from grpo_orch.policies.control.node_phases import HEARTBEAT_LOST_S, MACHINE_LOST_S
from grpo_orch.policies.control.rollback import begin_user_rollback
from grpo_orch.policies.fleet.budget import BUDGET, STOP_WAIT_S
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.breaker import REFUSALS, MachineKind
from grpo_orch.policies.model.events import (
    BudgetSet,
    CommandTaken,
    DocumentUnreadable,
    GatewayRestarted,
    SpecProved,
    StoreCaughtUp,
    StoreSlowed,
)
from grpo_orch.policies.model.phases import LIVE_NODE, LIVE_RUN, UNTRAINED_ROLLBACK
from grpo_orch.policies.model.state import Node, RunState
from grpo_orch.policies.model.vocabulary import NodePhase, Refusal, Role, RollbackStage, RunPhase
from grpo_orch.policies.serving.fitness import STARTS_MAX
from grpo_orch.policies.tick.draft import Tick
from grpo_orch.policies.tick.snapshot import BEFORE_TRAINING, HEARTBEAT_FRESH_S, Snapshot

RESTART_WAIT_S = 1.0  # before the first restart of a node's work; doubled for each in a row
RESTART_WAIT_MAX_S = 60.0
ROLLOUT_ATTEMPTS = 5  # runs of a rollout node's work on one machine; then the machine is replaced
SAME_FAILURE_MAX = 2  # failures in a row with the same last line, before the first step
WORTHWHILE_S = 3600.0  # a machine that lived this long was worth its start, which takes a tenth or two of it
# A cloud gives at most 120 s (AWS) from the notice to the end. A machine that still exists after this is useless:
# it has left the gateway for good.
NOTICE_MAX_S = 180.0
REPORTED_USD_MIN = 0.01  # smaller amounts are not reported
DOWN = "down"
# A trainer with one of these has ended as intended, or for a reason that another attempt would not fix.
ENDED = frozenset(
    {exit_codes.OK, exit_codes.STOPPED, exit_codes.FENCED, exit_codes.DIVERGED, exit_codes.OUT_OF_MEMORY}
)
DOWN_NOW = "down_now"  # also while a `down` is waiting


def restart_wait_s(failures: int) -> float:
    """Return the seconds to wait before the next try after `failures` failures in a row (at least 1)."""
    return float(min(RESTART_WAIT_MAX_S, RESTART_WAIT_S * 2 ** min(failures - 1, 10)))


def run_lifecycle(tick: Tick) -> None:
    """Move the run's phase and restart work that ended."""
    _commands(tick)
    _unreadable(tick)
    _gateway(tick)
    _store(tick)
    _proof(tick)
    for node in tick.state.live(Role.TRAINER):
        _trainer(tick, node)
    for node in tick.state.live(Role.ROLLOUT):
        _rollout(tick, node)
    _unpark(tick)


def _commands(tick: Tick) -> None:
    for command in tick.snapshot.commands:
        if command.command_id in tick.state.commands_taken:
            continue
        tick.emit(CommandTaken(command.command_id, command.kind), f"command: {command.kind}")
        if command.kind in (DOWN, DOWN_NOW):
            if tick.state.phase in LIVE_RUN:
                tick.move_run(RunPhase.STOPPING, "stop requested")
            for node in list(tick.state.nodes.values()) if command.kind == DOWN_NOW else ():
                if node.phase in LIVE_NODE:
                    tick.move(node, NodePhase.TERMINATING, "immediate stop requested")
        elif command.kind == BUDGET:
            tick.emit(BudgetSet(command.changes["usd"]), f"budget.usd is now {command.changes['usd']:.2f}")
        elif command.kind == "rollback":
            begin_user_rollback(tick, command)


def _unreadable(tick: Tick) -> None:
    known = tick.state.unreadable
    for key, why in tick.snapshot.store.unreadable.items():
        if key not in known:  # report each object once, even if its error changes
            tick.report(DocumentUnreadable(key, why), f"{key} cannot be read")


def _gateway(tick: Tick) -> None:
    boot_id = tick.snapshot.gateway.boot_id
    if boot_id is not None and boot_id != tick.state.gateway_boot_id:
        tick.emit(GatewayRestarted(boot_id), "the gateway is a new process")


def _store(tick: Tick) -> None:
    trainer = tick.snapshot.trainer
    if trainer is None:
        return
    if trainer.store_slow:
        event = StoreSlowed(trainer.step, trainer.stored_step or 0)
        tick.report(event, f"the store is slow: the checkpoint of step {trainer.step} is postponed")
    elif trainer.stored_step is not None and tick.state.is_store_slow:  # None: it has just started
        tick.report(StoreCaughtUp(trainer.step, trainer.stored_step), "the store has caught up")


def _proof(tick: Tick) -> None:
    """Journal once that a trainer can work with run.yaml: it trains, or has trained.

    The last heartbeat in the store may come from a lost machine; a trainer that starts from a checkpoint reports
    that step.
    """
    beat = tick.snapshot.trainer
    if beat is None or tick.state.is_proved:
        return
    if beat.activity not in BEFORE_TRAINING or beat.step > 0:
        tick.emit(SpecProved(), f"{beat.node} can train: rollout nodes may be requested")


def _trainer(tick: Tick, node: Node) -> None:
    if node.phase is NodePhase.SERVING and tick.state.phase is RunPhase.STARTING:
        tick.move_run(RunPhase.TRAINING, "the trainer sent its first heartbeat")
    _terminate_silent(tick, node)
    code, ended_at_s = tick.snapshot.exit_code_of(node), node.attempt_ended_at_s
    if code is not None and ended_at_s is not None and tick.state.phase in LIVE_RUN:
        _trainer_ended(tick, node, code, ended_at_s)
    if node.phase is NodePhase.DRAINING and (node := tick.state.nodes[node.id]).phase is NodePhase.DRAINING:
        _trainer_drains(tick, node)


def _terminate_silent(tick: Tick, node: Node) -> None:
    """Terminate a trainer without heartbeats, soon if its machine shows to work, otherwise after a long wait."""
    beat = tick.snapshot.trainer
    if node.phase is not NodePhase.SERVING or beat is None or beat.node != node.id:
        return
    snapshot, lost_s = tick.snapshot, tick.snapshot.machine_silent_s(beat.beat_at_s)
    if snapshot.trainer_only_silent_s(beat.beat_at_s) > HEARTBEAT_LOST_S:
        silent_s = tick.silent_s(beat.beat_at_s)
        tick.move(node, NodePhase.TERMINATING, f"no heartbeat for {silent_s:.0f} s while its machine works")
    elif lost_s > MACHINE_LOST_S and snapshot.machines is not None:
        tick.move(node, NodePhase.TERMINATING, f"no contact with its machine for {lost_s:.0f} s")


def _trainer_drains(tick: Tick, node: Node) -> None:
    """Terminate a draining trainer's machine once it is no longer needed."""
    if tick.state.phase is RunPhase.PARKED:
        drain_parked(tick, node)
        return
    others = [other for other in tick.state.live(Role.TRAINER) if other.id != node.id]
    if node.attempt_ended_at_s is not None:
        tick.move(node, NodePhase.TERMINATING, "drained: its work has ended")
    elif any(other.phase is NodePhase.SERVING for other in others):
        tick.move(node, NodePhase.TERMINATING, "drained: another machine trains")
    elif tick.silent_s(node.since_s) > NOTICE_MAX_S and not _has_fresh_heartbeat(tick, node):
        tick.move(node, NodePhase.TERMINATING, "drained; its preemption notice has expired")


def _has_fresh_heartbeat(tick: Tick, node: Node) -> bool:
    beat = tick.snapshot.trainer
    return beat is not None and beat.node == node.id and tick.waited_s(beat.beat_at_s) < HEARTBEAT_FRESH_S


def _trainer_ended(tick: Tick, node: Node, exit_code: int, ended_at_s: float) -> None:
    failures, rollback = tick.state.failures.count, tick.state.rollback
    if rollback is not None and rollback.stage in (RollbackStage.BEGUN, RollbackStage.FORKED):
        return  # it continues with the new timeline, once that exists
    beat = tick.snapshot.heartbeat_of(node)
    has_steps_left = beat is not None and (beat.max_steps == 0 or beat.step < beat.max_steps)
    if exit_code == exit_codes.OK and not has_steps_left:
        tick.move_run(RunPhase.FINISHED, tick.snapshot.exit_reason_of(node) or "the trainer reached its last step")
    elif failure := _final_failure(tick, node, exit_code):
        tick.move_run(RunPhase.FAILED, f"{failure}{_details(tick, node)}")
    elif exit_code == exit_codes.UNFIT_MACHINE:
        unfit = f"it cannot work with this run.yaml, although another trainer could{_details(tick, node)}"
        tick.move(node, NodePhase.TERMINATING, unfit, _failure_of(tick, node))
    elif node.phase is not NodePhase.DRAINING and tick.waited_s(ended_at_s) >= restart_wait_s(failures):
        tick.restart(node, f"restarted after exit code {exit_code}")


def _final_failure(tick: Tick, node: Node, exit_code: int) -> str:
    """Return why another attempt of a trainer that ended would not help; empty: it may."""
    failures, beat = tick.state.failures, tick.snapshot.heartbeat_of(node)
    if exit_code == exit_codes.OK and tick.state.phase is not RunPhase.PARKED:
        done = f", at {beat.step} of {beat.max_steps}" if beat is not None and beat.max_steps else ""
        return f"the trainer ended before its last step{done}"
    if exit_code == exit_codes.BAD_SPEC or (exit_code == exit_codes.UNFIT_MACHINE and not tick.state.is_proved):
        return "the trainer cannot work with this run.yaml"
    if exit_code == exit_codes.NOTHING_LEARNT:
        return "training has no effect"
    if exit_code == exit_codes.NO_INTACT_CHECKPOINT:
        return "none of the run's checkpoints can be restored"
    if failures.count > tick.spec.policies.trainer_restarts:
        return f"the trainer failed {failures.count} times without a step of progress"
    # With the same last line before its first step: an error of the user.
    if exit_code == exit_codes.FAILED and failures.step == 0 and failures.identical >= SAME_FAILURE_MAX:
        return f"the trainer failed {failures.identical} times in the same way before its first step"
    return ""


def _details(tick: Tick, node: Node) -> str:
    """Return the last line of work that ended, if it left one, and where its log is."""
    reason = tick.snapshot.exit_reason_of(node)
    return f"{': ' if reason else ''}{reason}; see `grpo-orch logs {node.id}`"


def _rollout(tick: Tick, node: Node) -> None:
    if node.phase is NodePhase.DRAINING:
        if tick.silent_s(node.since_s) > NOTICE_MAX_S:
            tick.move(node, NodePhase.TERMINATING, "drained; its preemption notice has expired")
        return
    if node.attempt_ended_at_s is None:
        return
    if tick.snapshot.exit_code_of(node) == exit_codes.BAD_SPEC:
        _spec_rejected(tick, node)
    elif tick.snapshot.exit_code_of(node) == exit_codes.UNFIT_MACHINE:
        _machine_unfit(tick, node)
    elif node.attempt >= ROLLOUT_ATTEMPTS:
        failed = f"its work failed {node.attempt} times{_details(tick, node)}"
        tick.move(node, NodePhase.TERMINATING, failed, _failure_of(tick, node))
    elif tick.waited_s(node.attempt_ended_at_s) >= restart_wait_s(node.attempt):
        tick.restart(node, "its work is restarted")


def _unpark(tick: Tick) -> None:
    """Continue a parked run once a rollout node has a machine and the old trainer's machine is gone.

    The node cannot be seen to serve before that: the gateway runs next to the trainer.
    """
    if tick.state.phase is not RunPhase.PARKED or any(n.role is Role.TRAINER for n in tick.state.nodes.values()):
        return
    started = (NodePhase.BOOTING, NodePhase.SERVING)
    nodes = [node for node in tick.state.live(Role.ROLLOUT) if node.phase in started]
    if nodes:
        parked_s = tick.waited_s(tick.state.parked_at_s or tick.snapshot.now_s)
        reason = f"{nodes[0].id} has a machine, after the run was parked for {parked_s / 60:.0f} min"
        tick.move_run(RunPhase.STARTING, f"{reason}; the trainer's machine is requested again")


def _failure_of(tick: Tick, node: Node) -> Refusal | None:
    """Return how to count a machine whose work failed permanently; None: it was worth its start."""
    if not node.served:
        return Refusal.NEVER_SERVED
    kind = tick.state.kinds.get(node.kind, MachineKind())
    # The time for all attempts and engine starts if engines never work for as long as they took to start.
    starts_s = 2 * ROLLOUT_ATTEMPTS * STARTS_MAX * (kind.boot_s or 0.0)
    soon_s = max(WORTHWHILE_S, starts_s)
    return Refusal.SOON_BROKEN if tick.waited_s(node.requested_at_s) < soon_s else None


def _spec_rejected(tick: Tick, node: Node) -> None:
    """Fail the run if a node cannot work with run.yaml; replace the machine if others of its kind have worked."""
    kind = tick.state.kinds.get(node.kind, MachineKind())
    if kind.served or any(other.served for other in tick.state.nodes.values() if other.kind == node.kind):
        reason = f"it cannot work with this run.yaml, although others could{_details(tick, node)}"
        tick.move(node, NodePhase.TERMINATING, reason, _failure_of(tick, node))
    elif tick.state.phase in LIVE_RUN:
        tick.move_run(RunPhase.FAILED, f"{node.id} cannot work with this run.yaml{_details(tick, node)}")


def _machine_unfit(tick: Tick, node: Node) -> None:
    """Replace a machine on which a rollout node cannot start.

    Fail the run if REFUSALS in a row cannot and none has ever worked: then run.yaml is the cause.
    """
    has_worked = any(kind.served for name, kind in tick.state.kinds.items() if name.startswith(node.role))
    has_worked |= any(other.served for other in tick.state.nodes.values() if other.role is node.role)
    count = tick.state.kinds.get(node.kind, MachineKind()).unserved_in_a_row + 1
    if not has_worked and count >= REFUSALS and tick.state.phase in LIVE_RUN:
        failure = f"{count} machines in a row cannot work with this run.yaml{_details(tick, node)}"
        tick.move_run(RunPhase.FAILED, failure)
    else:
        unfit = f"its work cannot start on this machine{_details(tick, node)}"
        tick.move(node, NodePhase.TERMINATING, unfit, _failure_of(tick, node))


# A run that stops or parks: the trainer gets the time to store its state; all other machines are released
# immediately. The trainer needs no rollout node for that: it abandons its present step and saves the end of the
# one before.


def release_machines(tick: Tick, *, is_affordable: bool) -> None:
    """Release every machine of a run that is over or stopping, and end the stop when all are gone.

    `is_affordable`: a trainer may store for longer than STOP_WAIT_S while it makes progress.
    """
    for node in list(tick.state.nodes.values()):
        if node.phase not in LIVE_NODE:
            continue
        if tick.state.phase is RunPhase.STOPPING and _may_store(tick, node, is_affordable=is_affordable):
            if node.phase is not NodePhase.DRAINING:
                tick.move(node, NodePhase.DRAINING, "storing its state before it ends")
            continue
        tick.move(node, NodePhase.TERMINATING, f"the run is {tick.state.phase}")
    machines = tick.snapshot.machines
    if tick.state.phase is RunPhase.STOPPING and not tick.state.nodes and not machines and machines is not None:
        is_paused = tick.state.money.is_reached
        reason = tick.state.reason if is_paused else "every machine is gone"
        if (unspent_usd := tick.state.money.unspent_usd) >= REPORTED_USD_MIN:
            unused = f"{unspent_usd:.2f} USD of this were reserved for requests that bought no machine"
            reason = f"{reason}; {unused}; `grpo-orch resume` continues with them"
        tick.move_run(RunPhase.PAUSED if is_paused else RunPhase.STOPPED, reason)


def drain_parked(tick: Tick, node: Node) -> None:
    """Return a parked trainer's machine once everything is stored, or after MACHINE_LOST_S.

    Sealed checkpoints that are not stored yet exist only on this machine. If the trainer fails to store them, it
    is restarted there, which stores them first, and the run continues.
    """
    if node.attempt_ended_at_s is None:
        if tick.silent_s(node.since_s) > MACHINE_LOST_S:
            tick.move(
                node, NodePhase.TERMINATING, f"still running {MACHINE_LOST_S:.0f} s after the request to end"
            )
        return
    code = tick.snapshot.exit_code_of(node)
    rollback = tick.state.rollback
    rolls_back = rollback is not None and rollback.stage in UNTRAINED_ROLLBACK
    if code in ENDED or code is None or rolls_back or tick.state.phase is not RunPhase.PARKED:
        tick.move(node, NodePhase.TERMINATING, "drained: its work has ended")
        return
    reason = f"its trainer ended with exit code {code} before everything was stored"
    tick.move(node, NodePhase.BOOTING, reason)
    tick.restart(tick.state.nodes[node.id], f"restarted: {reason}")
    tick.move_run(RunPhase.STARTING, f"not parked: {reason}")


def must_end(state: RunState, trainer: Node, snapshot: Snapshot) -> bool:
    """Whether to request the node's trainer to end: until it reports that it is leaving."""
    if state.phase not in (RunPhase.STOPPING, RunPhase.PARKED):
        return False
    if trainer.phase is not NodePhase.DRAINING or trainer.attempt_ended_at_s is not None:
        return False
    beat = snapshot.heartbeat_of(trainer)
    return beat is None or not beat.leaving


def _may_store(tick: Tick, node: Node, *, is_affordable: bool) -> bool:
    """Whether a node may still store state that would be lost with it."""
    if node.role is not Role.TRAINER or not node.may_be_working:
        return False
    beat = tick.snapshot.trainer
    since_s = max(node.since_s, tick.snapshot.trainer_moved_at_s) if is_affordable else node.since_s
    if node.phase is NodePhase.DRAINING and tick.waited_s(since_s) > STOP_WAIT_S:
        return False
    return beat is not None and beat.node == node.id and tick.silent_s(beat.beat_at_s) < HEARTBEAT_LOST_S
