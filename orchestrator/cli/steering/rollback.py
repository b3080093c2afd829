"""The command that takes a run back by hand: `grpo-orch rollback`."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from checkpoint.journal import journal
from checkpoint.records import documents
from checkpoint.store.run_store import Store
from checkpoint.stream.catalog import Catalog
from orchestrator.cli.checkpoints import find_checkpoint
from orchestrator.cli.options import AsJson, Output, Stop, Target, console, print_json
from orchestrator.cli.remote import controller_of, is_steered, start_remote
from orchestrator.cli.target import open_run
from orchestrator.control.launcher import TakenByAnother, start_daemon
from orchestrator.home import missing
from policies.control.objective import effects
from policies.control.rollback.begin import NAME_A_TARGET, RUN_START, WHOLE_NUMBER_KEYS, target_by_hand
from policies.model import exit_codes
from policies.model.spec import RunSpec, processes_of
from policies.model.state import Rollback, RunState
from policies.model.timelines import Fork, forked_spec
from policies.model.vocabulary import PolicyVersion, RunPhase

# The keys that a restarted trainer can take over, as they change no shape: the least that each may be, and whether
# it must be more.
CHANGEABLE: dict[str, tuple[float, bool]] = {
    "beta": (0.0, False),
    "epsilon": (0.0, True),
    "epsilon_high": (0.0, True),
    "learning_rate": (0.0, True),
    "max_grad_norm": (0.0, True),
    "temperature": (0.0, True),
    "max_completion_length": (1.0, False),
    "max_steps": (1.0, False),
}
TAKEN_S = 60.0  # how long the daemon may take to begin
POLL_S = 0.2


def rollback(
    target: Target = None,
    to: Annotated[
        str | None,
        typer.Option(help="TIMELINE-STEP, a step, `latest` or `start`; default: before what has gone wrong."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=NUMBER", help="Change a key of grpo; default: by policies.kl.on_rollback."
        ),
    ] = None,
    output: AsJson = Output.TEXT,
) -> None:
    """Go back to a checkpoint and on from there on a new timeline, with something changed."""
    wanted = dict(read_change(text) for text in changes or [])
    store, record = open_run(target)
    if not is_steered(store):
        refuse_missing_secrets(record.spec)
    state = journal.recover(store).state
    if state.phase is RunPhase.STOPPING:
        raise Stop(f"{record.spec.name} is stopping; wait for its end", exit_codes.USAGE)
    if state.phase is RunPhase.FINISHED and "max_steps" not in wanted:
        raise Stop(f"{record.spec.name} is finished; {more_steps(store, record.spec)}", exit_codes.USAGE)
    start = _start(store, to)
    _refuse_reached_steps(wanted, start)
    if start is None:
        _refuse_without_target(store, state)
    controller = controller_of(record, store)
    command = documents.send_command(store, "rollback", time.time(), start=start, changes=wanted)
    if not is_steered(store):
        if controller is not None:
            start_remote(controller, store, "rollback")
        else:
            with contextlib.suppress(TakenByAnother):  # which has the command, too
                start_daemon(store, record, "rollback")
    begun = _begun(store, command.command_id, state.rollbacks[-1:])
    grpo = forked_spec(record.spec, state.forks[-1] if state.forks else None).grpo
    does = effects(_new_changes(begun.fork, grpo), grpo, processes_of(record.spec))
    if output is Output.JSON:
        print_json({**_plain(begun), "effects": does})
    else:
        fork = begun.fork
        changed = ", ".join(f"{key} {value:g}" for key, value in fork.changes.items()) or "the seeds alone"
        console.print(
            f"{record.spec.name} goes back to {fork.start or 'its start'}, as timeline {fork.timeline}; "
            f"changed from run.yaml: {changed}.",
            highlight=False,
            soft_wrap=True,
        )
        for key, text in does.items():
            console.print(f"{key}: {text}", highlight=False, soft_wrap=True)
        if state.phase is RunPhase.PARKED:
            console.print(
                "It is parked: the new timeline is trained once a rollout node can be had.", soft_wrap=True
            )


def refuse_missing_secrets(spec: RunSpec) -> None:
    """Raise Stop when the environment lacks a secret that the nodes need."""
    if wrong := missing(spec, os.environ):
        raise Stop(f"{wrong}; export or remove it", exit_codes.USAGE)


def _new_changes(fork: Fork, grpo: Mapping[str, Any]) -> dict[str, float]:
    """What a fork changed, beyond its predecessors."""
    return {key: value for key, value in fork.changes.items() if grpo.get(key) != value}


def more_steps(store: Store, spec: RunSpec) -> str:
    """Say how a finished run is trained further."""
    steps = int(spec.grpo.get("max_steps", -1))
    example = 2 * steps if steps > 0 else "N"
    return f"train it further with: grpo-orch resume {store.quoted} --set max_steps={example}"


def _refuse_reached_steps(changes: Mapping[str, float], start: str | None) -> None:
    """Raise Stop where no step would be left to train."""
    steps = changes.get("max_steps")
    reached = 0 if start in (None, RUN_START) else PolicyVersion.parse(start).step
    if steps is not None and steps <= reached:
        message = f"--set max_steps={steps:g}: the checkpoint has reached step {reached}; expected more"
        raise Stop(message, exit_codes.USAGE)


def read_change(text: str) -> tuple[str, float]:
    """`beta=0.08` as key and value. Raises Stop."""
    key, _, number = text.partition("=")
    if key not in CHANGEABLE:
        raise Stop(f"--set {text}: expected KEY=NUMBER, KEY one of {', '.join(CHANGEABLE)}", exit_codes.USAGE)
    least, more = CHANGEABLE[key]
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < least or (more and value == least):
        bound = f"above {least:g}" if more else f"of {least:g} or more"
        raise Stop(f"--set {text}: expected a number {bound}, as in {key}=0.1", exit_codes.USAGE)
    if key in WHOLE_NUMBER_KEYS and not value.is_integer():
        raise Stop(f"--set {text}: expected a whole number, as in {key}=256", exit_codes.USAGE)
    return key, value


def _start(store: Store, to: str | None) -> str | None:
    """The version that a word means, RUN_START, or None where nothing is said. Raises Stop."""
    if to is None or to == RUN_START:
        return to
    if to in ("0", "0-0"):
        return RUN_START
    return find_checkpoint(Catalog(store, "rollback").newest().checkpoints, to).version


def _refuse_without_target(store: Store, state: RunState) -> None:
    """Raise Stop where the policy finds nothing to go back to, and a person must name it."""
    present = Catalog(store, "rollback").newest()
    target = target_by_hand(state, [one.at for one in present.checkpoints], ever_stored=present.number > 0)
    if target.missing:
        raise Stop(f"{target.missing}; {NAME_A_TARGET}", exit_codes.USAGE)


def _begun(store: Store, command_id: str, before: tuple[Rollback, ...]) -> Rollback:
    """Return the rollback that the daemon begins upon the command. Raises Stop."""
    deadline_s = time.monotonic() + TAKEN_S
    with console.status("waiting for the daemon"):
        while time.monotonic() < deadline_s:
            state: RunState = journal.recover(store).state
            if command_id in state.commands_taken:
                last = state.rollbacks[-1:]
                if last and [one.fork for one in last] != [one.fork for one in before]:
                    return last[0]
                why = f"but the run is {state.phase}, and no rollback was begun; see `grpo-orch events`"
                raise Stop(f"the daemon took the command, {why}", exit_codes.FAILED)
            time.sleep(POLL_S)
    hint = "it stays in the store and is carried out by `grpo-orch resume`"
    raise Stop(f"the daemon did not take the command within {TAKEN_S:.0f} s; {hint}", exit_codes.FAILED)


def _plain(begun: Rollback) -> dict[str, object]:
    fork = begun.fork
    return {"timeline": fork.timeline, "start": fork.start, "changes": dict(fork.changes), "cause": begun.cause}
