"""The run's own life: commands, first heartbeat, the trainer's exits, the end."""

from __future__ import annotations

from policies import exit_codes
from policies.events import CommandTaken, GatewayRestarted, StoreCaughtUp, StoreSlowed
from policies.mirror import HEARTBEAT_LOST_S
from policies.snapshot import Machine
from policies.state import Node
from policies.tick import Tick
from policies.transaction import begin_by_hand
from policies.vocabulary import NodePhase, Role, RollbackStage, RunPhase

RESTART_WAIT_S = 1.0  # before the first restart of a node's work; doubled for each in a row
RESTART_WAIT_MAX_S = 60.0
ROLLOUT_ATTEMPTS = 5  # runs of a rollout node's work on one machine; then the machine is replaced
# From the notice to the end a cloud gives 120 s (AWS) or less. A machine that is still there after this is paid
# for nothing: it has left the gateway for good.
NOTICE_TAKES_S = 180.0


def restart_wait_s(failures: int) -> float:
    """Seconds to wait before the next try after `failures` failures in a row (1 or more)."""
    return float(min(RESTART_WAIT_MAX_S, RESTART_WAIT_S * 2 ** min(failures - 1, 10)))


def run_lifecycle(tick: Tick) -> None:
    """Move the run's phase and restart work that ended."""
    _commands(tick)
    _gateway(tick)
    _store(tick)
    for node in tick.state.live(Role.TRAINER):
        _trainer(tick, node)
    for node in tick.state.live(Role.ROLLOUT):
        _rollout(tick, node)


def _commands(tick: Tick) -> None:
    for command in tick.snapshot.commands:
        if command.command_id in tick.state.commands_taken:
            continue
        tick.emit(CommandTaken(command.command_id, command.kind), f"command: {command.kind}")
        if command.kind == "down" and tick.state.phase in (RunPhase.STARTING, RunPhase.TRAINING):
            tick.move_run(RunPhase.STOPPING, "asked to stop")
        elif command.kind == "rollback":
            begin_by_hand(tick, command)


def _gateway(tick: Tick) -> None:
    boot_id = tick.snapshot.gateway_boot_id
    if boot_id is not None and boot_id != tick.state.gateway_boot_id:
        tick.emit(GatewayRestarted(boot_id), "the gateway is a new process")


def _store(tick: Tick) -> None:
    trainer = tick.snapshot.trainer
    if trainer is None or trainer.store_slow == tick.state.store_slow:
        return
    if trainer.store_slow:
        event = StoreSlowed(trainer.step, trainer.stored_step or 0)
        tick.emit(event, f"the store is slow: the checkpoint of step {trainer.step} is put off")
    elif trainer.stored_step is not None:  # a trainer that has only just started cannot know
        tick.emit(StoreCaughtUp(trainer.step, trainer.stored_step), "the store has caught up")


def _trainer(tick: Tick, node: Node) -> None:
    state, beat = tick.state, tick.snapshot.trainer
    if node.phase is NodePhase.SERVING and state.phase is RunPhase.STARTING:
        tick.move_run(RunPhase.TRAINING, "the trainer has its first heartbeat")
    if node.phase is NodePhase.SERVING and beat is not None and beat.node == node.id:
        silent_s = tick.snapshot.now_s - beat.beat_at_s
        if silent_s > HEARTBEAT_LOST_S:
            tick.move(node, NodePhase.TERMINATING, f"no heartbeat for {silent_s:.0f} s while its machine is up")
    if node.attempt_ended_at_s is None or tick.state.phase not in (RunPhase.STARTING, RunPhase.TRAINING):
        return
    machine = (tick.snapshot.machines or {}).get(node.id)
    if machine is not None and machine.attempt == node.attempt and machine.exit_code is not None:
        _trainer_ended(tick, node, machine, machine.exit_code)


def _trainer_ended(tick: Tick, node: Node, machine: Machine, exit_code: int) -> None:
    log = f"see `grpo-orch logs {machine.node}`"
    failures, rollback = tick.state.trainer_failures, tick.state.rollback
    if rollback is not None and rollback.stage in (RollbackStage.BEGUN, RollbackStage.FORKED):
        return  # it goes on with the new timeline, once that is there
    if exit_code == exit_codes.OK:
        tick.move_run(RunPhase.FINISHED, "the trainer reached its last step")
    elif exit_code == exit_codes.BAD_SPEC:
        tick.move_run(RunPhase.FAILED, f"the trainer cannot work with this run.yaml; {log}")
    elif failures > tick.spec.policies.trainer_restarts:
        tick.move_run(RunPhase.FAILED, f"the trainer failed {failures} times without a step of progress; {log}")
    elif node.attempt_ended_at_s is not None:
        due_s = node.attempt_ended_at_s + restart_wait_s(failures)
        if tick.snapshot.now_s >= due_s:
            tick.restart(node, f"restarted after exit code {exit_code}")


def _rollout(tick: Tick, node: Node) -> None:
    if node.phase is NodePhase.DRAINING:
        if tick.snapshot.now_s - node.since_s > NOTICE_TAKES_S:
            tick.move(node, NodePhase.TERMINATING, "drained, and its notice is over")
        return
    if node.attempt_ended_at_s is None:
        return
    if node.attempt >= ROLLOUT_ATTEMPTS:
        tick.move(node, NodePhase.TERMINATING, f"its work failed {node.attempt} times; another machine is tried")
    elif tick.snapshot.now_s >= node.attempt_ended_at_s + restart_wait_s(node.attempt):
        tick.restart(node, "its work is started again")
