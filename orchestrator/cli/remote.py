"""What up, resume and down do for a run whose daemon runs on a controller machine: `--remote`.

The run is created in its store by `up` here, before anything is launched, and the daemon there takes it over.
So a crash in between leaves a run that `resume` and `down` know, and launching twice is launching once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from checkpoint import journal
from checkpoint.records import documents
from checkpoint.records.documents import RunRecord
from checkpoint.store.document import Unreadable
from checkpoint.store.run_store import Store
from orchestrator.cli.options import Stop, console
from orchestrator.clouds import open_controller
from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from orchestrator.clouds.sky.remote import RemoteController
from orchestrator.control.lease import is_held
from policies.model import exit_codes
from policies.model.phases import TERMINAL_RUN

DAEMON_TIMEOUT_S = 1200.0  # a bare machine gets an environment first
POLL_S = 0.5
ENDED_EVERY_S = 5.0  # between two questions to SkyPilot, which take it a second


def controller_of(record: RunRecord, store: Store, *, wanted: bool = False) -> RemoteController | None:
    """The controller machine of a run that has one, or is `wanted` to; else None. Raises Stop, CloudMissing."""
    if wanted and record.spec.cloud != "sky":
        message = f"--remote needs `cloud: sky`; {record.spec.name} is on `cloud: local`, which is this machine"
        raise Stop(message, exit_codes.USAGE)
    if wanted or documents.CONTROLLER.read(store) is not None:
        return open_controller(record, store)
    return None


def refuse_unknown_machines(controller: RemoteController, store: Store, nodes: Sequence[str]) -> None:
    """Raise Stop when the run has machines that a new controller machine would not know, and so buy again."""
    if nodes and not controller.exists():
        remedy = f"`grpo-orch down {store.quoted}`, then `grpo-orch resume --remote {store.quoted}`"
        raise Stop(
            f"a new controller machine would not know {', '.join(nodes)}, and would buy others; first {remedy}",
            exit_codes.FAILED,
        )


def start_remote(controller: RemoteController, store: Store, reason: str) -> None:
    """Launch the controller machine and wait until its daemon steers the run. Raises Stop."""
    try:
        with console.status(f"launching {controller.cluster}"):
            controller.launch(reason)
    except (CloudRefused, CloudUnavailable) as error:
        hint = f"try again with `grpo-orch resume {store.quoted}`, or end it with `grpo-orch down {store.quoted}`"
        raise Stop(f"{controller.cluster}: {error}; the run is kept: {hint}", exit_codes.FAILED) from error
    with console.status(f"waiting for the daemon on {controller.cluster}"):
        _wait_for_daemon(controller, store)


def stop_remote(
    controller: RemoteController,
    store: Store,
    *,
    known: bool,
    kind: str,
    wait: Callable[[Callable[[], bool]], None],
) -> None:
    """Have the daemon there stop the run and return its machines, then return its own. Raises Stop.

    `kind` is of the command that stops it; `wait` returns once the function that it gets is True.
    """
    if not _is_over(store):
        command = documents.send_command(store, kind, time.time())
        if not is_steered(store):
            start_remote(controller, store, "down")
        wait(lambda: _is_over_there(controller, store))
        # One that nobody took would stop the run when it is resumed.
        documents.command(command.command_id).drop(store)
    if not known:
        remedy = f"run `grpo-orch down {store.quoted}` where it was launched"
        raise Stop(
            f"the run's machines are returned, but {controller.cluster} is not on record here; {remedy}",
            exit_codes.FAILED,
        )
    with console.status(f"returning {controller.cluster}"):
        controller.down()


def say_lost(controller: RemoteController, nodes: Sequence[str]) -> None:
    """Raise Stop when a controller machine that is gone has taken the records of these machines with it."""
    if nodes:
        raise Stop(
            f"{controller.cluster} is gone, and with it SkyPilot's records of {', '.join(nodes)}; "
            f"see at the cloud's console that nothing labelled `grpo-orch: {controller.nodes}-...` is left",
            exit_codes.FAILED,
        )


def remote_log(controller: RemoteController, store: Store, node: str, follow: bool) -> Iterator[str]:
    """The lines of the daemon's log: those of the run's machines are known to the controller machine alone.

    Raises Stop when it is another's, or when the controller machine is.
    """
    if node != "daemon":
        known = f"{controller.cluster} alone knows the machines of this run"
        raise Stop(f"{known}; there is `grpo-orch logs daemon {store.quoted}`", exit_codes.USAGE)
    try:
        return controller.log(follow=follow)
    except KeyError:
        unknown = f"{controller.cluster} is not on record here; ask where it was launched"
        raise Stop(unknown, exit_codes.USAGE) from None


def is_steered(store: Store) -> bool:
    """Whether a daemon holds the run, wherever."""
    return is_held(lambda: documents.LEASE.read(store, Unreadable()))


def _is_over(store: Store) -> bool:
    """Whether the run has ended, none of its machines is left, and its daemon has gone."""
    if is_steered(store):
        return False
    state = journal.recover(store).state
    return state.phase in TERMINAL_RUN and not state.nodes


def _is_over_there(controller: RemoteController, store: Store) -> bool:
    """Whether the run has ended, as above. Raises Stop when nobody there will end it."""
    if _is_over(store):
        return True
    _refuse_ended(controller, store)
    return False


def _wait_for_daemon(controller: RemoteController, store: Store) -> None:
    deadline_s = time.monotonic() + DAEMON_TIMEOUT_S
    while time.monotonic() < deadline_s:
        ask_again_s = time.monotonic() + ENDED_EVERY_S
        while time.monotonic() < ask_again_s:
            if is_steered(store):
                return
            time.sleep(POLL_S)
        with contextlib.suppress(CloudUnavailable):  # the store says more, and is asked again
            if controller.has_ended():
                if _is_over(store):
                    return  # nothing was left to steer
                _refuse_ended(controller, store)
    late = f"has not taken the run within {DAEMON_TIMEOUT_S / 60:.0f} min; see `sky logs {controller.cluster}`"
    raise Stop(f"the daemon on {controller.cluster} {late}", exit_codes.FAILED)


def _refuse_ended(controller: RemoteController, store: Store) -> None:
    """Raise Stop when nobody steers the run, though it is not over, and nobody there will start a daemon again."""
    if is_steered(store) or not controller.has_ended() or is_steered(store) or _is_over(store):
        return
    said = f"its last words: {controller.last_words()}; see `sky logs {controller.cluster}`"
    raise Stop(f"the daemon on {controller.cluster} has ended, and the run has not; {said}", exit_codes.FAILED)
