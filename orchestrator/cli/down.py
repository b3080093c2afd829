"""down: stop a run, with what its trainer has stored, and return its machines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from checkpoint import journal
from checkpoint.records import documents
from checkpoint.records.documents import RunRecord
from checkpoint.store.run_store import Store
from orchestrator.cli.options import AsJson, Output, Stop, Target, console, errors, print_json
from orchestrator.cli.remote import controller_of, is_steered, say_lost, stop_remote
from orchestrator.cli.target import open_run
from orchestrator.clouds import open_cloud
from orchestrator.clouds.protocol import Cloud, CloudUnavailable
from orchestrator.control.launcher import TakenByAnother, start_daemon
from policies.control.stopping import DOWN, DOWN_NOW
from policies.fleet.budget import STOP_WAIT_S
from policies.model import exit_codes
from policies.model.phases import TERMINAL_RUN
from policies.model.state import RunState
from policies.model.vocabulary import NodePhase, Role, RunPhase
from policies.tick.snapshot import Command

CLOUD_WAIT_S = 60.0  # an API server that has to be started takes ten seconds
POLL_S = 0.2
SAY_S = 1.0  # between two looks at how far the trainer is

Now = Annotated[
    bool, typer.Option("--now", help="Do not wait for the trainer to store what it has since its last checkpoint.")
]


def down(target: Target = None, now: Now = False, output: AsJson = Output.TEXT) -> None:
    """Stop a run and return its machines. What is stored stays; `resume` continues it.

    The trainer first stores the steps that it has taken; Ctrl-C twice, or --now, does without.
    """
    store, record = open_run(target)
    controller = controller_of(record, store)
    stopping = Stopping(store, DOWN_NOW if now else DOWN)
    if controller is None:
        _stop_here(store, record, stopping)
    elif not ((known := controller.exists()) and _is_needed(store)) and not is_steered(store):
        if known:  # first of all: a daemon may come up there yet
            controller.down()
        nodes = sorted(_state(store).nodes)
        _stop_here(store, record, stopping)
        documents.forget_controller(store, time.time())
        say_lost(controller, nodes)
    else:
        stop_remote(controller, store, known=known, kind=stopping.kind, wait=stopping.wait)
    _say_end(store, record, output)


def _is_needed(store: Store) -> bool:
    """Whether only a daemon on the controller machine can end the run, because its SkyPilot alone knows machines
    of it; or one has ended it, so that nothing is left to do but to return that machine."""
    state = _state(store)
    return bool(state.nodes) or state.phase in TERMINAL_RUN


class Stopping:
    """The waiting for the end of a run: says what it waits for, and heeds Ctrl-C.

    Args:
        store: the run's.
        kind: of the command that stops it.
    """

    def __init__(self, store: Store, kind: str) -> None:
        self.kind = kind
        self._store = store
        self._interrupts = 0
        self._hurried: Command | None = None

    def wait(self, over: Callable[[], bool]) -> None:
        """Return once it is over.

        The first Ctrl-C says what a second one does, which is not to wait for the trainer; a third leaves the rest
        to whoever steers the run. Raises KeyboardInterrupt.
        """
        began_s = said_s = time.monotonic()
        with errors.status("returning the machines") as status:
            while True:
                try:
                    if over():
                        break
                    if time.monotonic() - said_s > SAY_S:
                        said_s = time.monotonic()
                        status.update(_at_work(self._store, said_s - began_s))
                    time.sleep(POLL_S)
                except KeyboardInterrupt:
                    self._interrupted()
        if self._hurried is not None:  # one that nobody took would stop the run when it is resumed
            documents.command(self._hurried.command_id).drop(self._store)

    def _interrupted(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1 and self.kind == DOWN:
            errors.print("Ctrl-C once more: return the machines at once, without what is being stored.")
        elif self._interrupts == 2 and self.kind == DOWN:
            self._hurried = documents.send_command(self._store, DOWN_NOW, time.time())
            errors.print("The machines are returned at once.")
        else:
            raise KeyboardInterrupt


def _at_work(store: Store, waited_s: float) -> str:
    """What the end of the run waits for, in words."""
    state, beat = _state(store), documents.TRAINER.read(store)
    storing = [node for node in state.live(Role.TRAINER) if node.phase is NodePhase.DRAINING]
    if not storing or beat is None:
        return "returning the machines"
    stored = "nothing is stored yet" if beat.stored_step is None else f"step {beat.stored_step} is stored"
    share = ""
    if (stage := beat.stage) is not None and stage.total_bytes:
        share = f", {stage.done_bytes / stage.total_bytes:.0%} is sent"
    waits = f"{waited_s:.0f} s; it is given up {STOP_WAIT_S:.0f} s after it last got on"
    return f"the trainer stores step {beat.step} ({stored}{share}; {waits})"


def _say_end(store: Store, record: RunRecord, output: Output) -> None:
    state, beat = _state(store), documents.TRAINER.read(store)
    said: dict[str, Any] = {"run": record.spec.name, "phase": state.phase, "machines": sorted(state.nodes)}
    said["step"] = None if beat is None else beat.step
    said["stored_step"] = None if beat is None else beat.stored_step
    if output is Output.JSON:
        print_json(said)
        return
    console.print(f"{record.spec.name} is {state.phase}; no machine of it is left.", highlight=False)
    if state.phase is RunPhase.FINISHED:
        return
    if beat is not None and (again := beat.step - (beat.stored_step or 0)) > 0:
        stored = "No checkpoint" if beat.stored_step is None else f"Step {beat.stored_step}"
        console.print(f"{stored} is stored; {again} step(s) will be made again.", highlight=False)
    console.print(f"Continue with: grpo-orch resume {store.quoted}", highlight=False, soft_wrap=True)


def _stop_here(store: Store, record: RunRecord, stopping: Stopping) -> None:
    """Have a daemon of this machine stop the run, the one that steers it or a new one. Raises Stop."""
    cloud = open_cloud(record, store)
    command = documents.send_command(store, stopping.kind, time.time())
    if not is_steered(store):
        with contextlib.suppress(TakenByAnother):  # which has the command, too
            start_daemon(store, record, "down")
    stopping.wait(lambda: not is_steered(store))
    # Sent to a daemon that looked for no more of them, it would stop the run once it is resumed.
    documents.command(command.command_id).drop(store)
    again = f"run `grpo-orch down {store.quoted}` again"
    if left := _machines_left(cloud):
        raise Stop(f"still there: {', '.join(left)}; {again}", exit_codes.FAILED)
    if (phase := _state(store).phase) not in TERMINAL_RUN:
        raise Stop(f"its daemon has ended and the run is {phase}; {again}", exit_codes.FAILED)
    cloud.clean_up()


def _machines_left(cloud: Cloud) -> list[str]:
    """What the cloud still shows of the run. Raises CloudUnavailable when it does not say so for too long."""
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
