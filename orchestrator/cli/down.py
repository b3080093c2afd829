"""`grpo-orch down`: stop a run after its trainer has stored a checkpoint, and return the machines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.cli.options import (
    AsJson,
    Output,
    Stop,
    Target,
    console,
    errors,
    print_json,
    print_line,
)
from grpo_orch.orchestrator.cli.remote import controller_of, has_daemon, refuse_lost_machines, stop_remote
from grpo_orch.orchestrator.cli.target import open_run
from grpo_orch.orchestrator.clouds import open_cloud
from grpo_orch.orchestrator.clouds.protocol import Cloud, CloudUnavailable
from grpo_orch.orchestrator.control.launcher import AlreadyControlled, start_daemon
from grpo_orch.policies.control.lifecycle import DOWN, DOWN_NOW
from grpo_orch.policies.fleet.budget import STOP_WAIT_S
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.phases import TERMINAL_RUN
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.model.vocabulary import NodePhase, Role, RunPhase
from grpo_orch.policies.tick.snapshot import Command

CLOUD_WAIT_S = 60.0  # starting SkyPilot's API server takes ten seconds
POLL_S = 0.2
REPORT_S = 1.0  # between two updates of the trainer's progress

Now = Annotated[bool, typer.Option("--now", help="Do not wait for the trainer to store a last checkpoint.")]


def down(target: Target = None, now: Now = False, output: AsJson = Output.TEXT) -> None:
    """Stop a run and return its machines. The store keeps all data; `resume` continues the run.

    The trainer first stores a checkpoint of its latest step. To skip that, press Ctrl-C twice or pass --now.
    """
    store, record = open_run(target)
    controller = controller_of(record, store)
    stopping = Stopping(store, DOWN_NOW if now else DOWN)
    if controller is None:
        _stop_here(store, record, stopping)
    elif not ((known := controller.exists()) and _needs_controller(store)) and not has_daemon(store):
        if known:  # before anything else, because a daemon may still be starting there
            controller.down()
        nodes = sorted(_state(store).nodes)
        _stop_here(store, record, stopping)
        documents.forget_controller(store, time.time())
        refuse_lost_machines(controller, nodes)
    else:
        stop_remote(controller, store, known=known, kind=stopping.kind, wait=stopping.wait)
    _print_end(store, record, output)


def _needs_controller(store: Store) -> bool:
    """Return whether a daemon on the controller machine has to end the run, or has ended it already.

    Only that machine's SkyPilot knows the run's machines.
    """
    state = _state(store)
    return bool(state.nodes) or state.phase in TERMINAL_RUN


class Stopping:
    """Waits for the end of a run, shows the trainer's progress, and handles Ctrl-C.

    Args:
        store: the run's store.
        kind: the kind of the command that stops the run.
    """

    def __init__(self, store: Store, kind: str) -> None:
        self.kind = kind
        self._store = store
        self._interrupts = 0
        self._down_now: Command | None = None

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Return when `is_over` returns True.

        The first Ctrl-C explains the second, which skips the trainer's checkpoint. The third stops waiting; the
        daemon continues. Raises KeyboardInterrupt.
        """
        started_s = updated_s = time.monotonic()
        with errors.status("returning the machines") as status:
            while True:
                try:
                    if is_over():
                        break
                    if time.monotonic() - updated_s > REPORT_S:
                        updated_s = time.monotonic()
                        status.update(progress(self._store, updated_s - started_s))
                    time.sleep(POLL_S)
                except KeyboardInterrupt:
                    self._interrupted()
        if self._down_now is not None:  # if no daemon took it, it would stop the run on resume
            documents.command(self._down_now.command_id).drop(self._store)

    def _interrupted(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1 and self.kind == DOWN:
            errors.print("Press Ctrl-C again to return the machines now, without waiting for the checkpoint.")
        elif self._interrupts == 2 and self.kind == DOWN:
            self._down_now = documents.send_command(self._store, DOWN_NOW, time.time())
            errors.print("Returning the machines now.")
        else:
            raise KeyboardInterrupt


def progress(store: Store, waited_s: float) -> str:
    """Describe what stopping the run waits for."""
    state, beat = _state(store), documents.TRAINER.read(store)
    storing = [node for node in state.live(Role.TRAINER) if node.phase is NodePhase.DRAINING]
    if not storing or beat is None:
        return "returning the machines"
    stored = "nothing stored yet" if beat.stored_step is None else f"step {beat.stored_step} is stored"
    share = ""
    if (stage := beat.stage) is not None and stage.total_bytes:
        share = f", {stage.done_bytes / stage.total_bytes:.0%} uploaded"
    limit = f"{waited_s:.0f} s; times out after {STOP_WAIT_S:.0f} s without progress"
    return f"the trainer is storing step {beat.step} ({stored}{share}; {limit})"


def _print_end(store: Store, record: RunRecord, output: Output) -> None:
    state, beat = _state(store), documents.TRAINER.read(store)
    result: dict[str, Any] = {"run": record.spec.name, "phase": state.phase, "machines": sorted(state.nodes)}
    result["step"] = None if beat is None else beat.step
    result["stored_step"] = None if beat is None else beat.stored_step
    if output is Output.JSON:
        print_json(result)
        return
    console.print(f"{record.spec.name}: {state.phase}; all its machines are returned.")
    if state.phase is RunPhase.FINISHED:
        return
    if beat is not None and (lost := beat.step - (beat.stored_step or 0)) > 0:
        stored = "No checkpoint" if beat.stored_step is None else f"Step {beat.stored_step}"
        console.print(f"{stored} is stored; {lost} step(s) will be repeated.")
    print_line(f"Continue with: grpo-orch resume {store.quoted}")


def _stop_here(store: Store, record: RunRecord, stopping: Stopping) -> None:
    """Have the run's daemon, or a new one on this machine, stop the run. Raises Stop."""
    cloud = open_cloud(record, store)
    command = documents.send_command(store, stopping.kind, time.time())
    if not has_daemon(store):
        with contextlib.suppress(AlreadyControlled):  # the other daemon takes the command
            start_daemon(store, record, "down")
    stopping.wait(lambda: not has_daemon(store))
    # If the daemon exited without taking the command, it would stop the run on resume.
    documents.command(command.command_id).drop(store)
    hint = f"run `grpo-orch down {store.quoted}` again"
    if left := _machines_left(cloud):
        raise Stop(f"still running: {', '.join(left)}; {hint}", exit_codes.FAILED)
    if (phase := _state(store).phase) not in TERMINAL_RUN:
        raise Stop(f"the daemon exited while the run is {phase}; {hint}", exit_codes.FAILED)
    cloud.clean_up()


def _machines_left(cloud: Cloud) -> list[str]:
    """Return the run's machines that still exist. Raises CloudUnavailable if the cloud does not answer in time."""
    deadline_s = time.monotonic() + CLOUD_WAIT_S
    while True:
        try:
            return sorted(cloud.machines())
        except CloudUnavailable:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(POLL_S)


def _state(store: Store) -> RunState:
    return journal.recover(store).state
