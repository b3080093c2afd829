"""`--remote`: start, stop and watch a run whose daemon runs on a controller machine in the cloud.

`up` creates the run in its store before it launches anything, and the daemon there takes the run over. So a crash
in between leaves a run that `resume` and `down` can handle, and launching is idempotent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.cli.options import Stop, errors
from grpo_orch.orchestrator.clouds import open_controller
from grpo_orch.orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from grpo_orch.orchestrator.clouds.sky.remote_controller import RemoteController
from grpo_orch.orchestrator.control.lease import is_held
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.phases import TERMINAL_RUN

DAEMON_TIMEOUT_S = 1200.0  # includes installing the environment
POLL_S = 0.5
ENDED_EVERY_S = 5.0  # between two queries to SkyPilot, which take a second each


def controller_of(record: RunRecord, store: Store, *, wanted: bool = False) -> RemoteController | None:
    """Return the run's controller machine if it has one or `wanted`; else None. Raises Stop, CloudMissing."""
    if wanted and record.spec.cloud != "sky":
        message = f"--remote needs `cloud: sky`; {record.spec.name} has `cloud: local`, which is this machine"
        raise Stop(message)
    if wanted or documents.CONTROLLER.read(store) is not None:
        return open_controller(record, store)
    return None


def refuse_unknown_machines(controller: RemoteController, store: Store, nodes: Sequence[str]) -> None:
    """Raise Stop if a new controller machine would not know the run's machines and buy them again."""
    if nodes and not controller.exists():
        remedy = f"run `grpo-orch down {store.quoted}`, then `grpo-orch resume --remote {store.quoted}`"
        raise Stop(
            f"a new controller machine would not know {', '.join(nodes)} and would buy duplicates; {remedy}",
            exit_codes.FAILED,
        )


def start_remote(controller: RemoteController, store: Store, reason: str) -> None:
    """Launch the controller machine and wait until its daemon holds the run. Raises Stop."""
    try:
        with errors.status(f"launching {controller.cluster}"):
            controller.launch(reason)
    except (CloudRefused, CloudUnavailable) as error:
        hint = (
            f"retry with `grpo-orch resume {store.quoted}`, or stop the run with `grpo-orch down {store.quoted}`"
        )
        raise Stop(f"{controller.cluster}: {error}; the store keeps the run: {hint}", exit_codes.FAILED) from error
    with errors.status(f"waiting for the daemon on {controller.cluster}"):
        _wait_for_daemon(controller, store)


def stop_remote(
    controller: RemoteController,
    store: Store,
    *,
    known: bool,
    kind: str,
    wait: Callable[[Callable[[], bool]], None],
) -> None:
    """Have the remote daemon stop the run and return its machines, then return the controller machine.

    Args:
        controller: the controller machine.
        store: the run's store.
        known: whether this machine's SkyPilot knows the controller machine.
        kind: the kind of the command that stops the run.
        wait: returns when its argument returns True.

    Raises:
        Stop: a machine could not be returned.
    """
    if not _is_over(store):
        command = documents.send_command(store, kind, time.time())
        if not has_daemon(store):
            start_remote(controller, store, "down")
        wait(lambda: _is_over_there(controller, store))
        # If no daemon took the command, it would stop the run on resume.
        documents.command(command.command_id).drop(store)
    if not known:
        remedy = f"run `grpo-orch down {store.quoted}` on the machine that launched it"
        raise Stop(
            f"the run's machines are returned, but this machine has no record of {controller.cluster}; {remedy}",
            exit_codes.FAILED,
        )
    with errors.status(f"returning {controller.cluster}"):
        controller.down()


def refuse_lost_machines(controller: RemoteController, nodes: Sequence[str]) -> None:
    """Raise Stop if the controller machine is gone, and with it SkyPilot's records of these machines."""
    if nodes:
        raise Stop(
            f"{controller.cluster} is gone, and with it SkyPilot's records of {', '.join(nodes)}; check in the "
            f"cloud's console that no machine labelled `grpo-orch: {controller.nodes}-...` is still running",
            exit_codes.FAILED,
        )


def remote_log(controller: RemoteController, store: Store, node: str, follow: bool) -> Iterator[str]:
    """Return the lines of the daemon's log; only the controller machine has the logs of the run's machines.

    Raises Stop for another log, or if this machine does not know the controller machine.
    """
    if node != "daemon":
        why = f"only {controller.cluster} has the logs of this run's machines"
        raise Stop(f"{why}; see `grpo-orch logs daemon {store.quoted}`")
    try:
        return controller.log(follow=follow)
    except KeyError:
        unknown = f"this machine has no record of {controller.cluster}; run the command where it was launched"
        raise Stop(unknown) from None


def has_daemon(store: Store) -> bool:
    """Return whether a daemon on any machine holds the run."""
    return is_held(lambda: documents.LEASE.read(store, UnreadableDocuments()))


def _is_over(store: Store) -> bool:
    """Return whether the run has ended, its machines are returned, and its daemon has exited."""
    if has_daemon(store):
        return False
    state = journal.recover(store).state
    return state.phase in TERMINAL_RUN and not state.nodes


def _is_over_there(controller: RemoteController, store: Store) -> bool:
    """Return the same as `_is_over`. Raises Stop if the controller machine will not end the run."""
    if _is_over(store):
        return True
    _refuse_ended(controller, store)
    return False


def _wait_for_daemon(controller: RemoteController, store: Store) -> None:
    deadline_s = time.monotonic() + DAEMON_TIMEOUT_S
    while time.monotonic() < deadline_s:
        ask_again_s = time.monotonic() + ENDED_EVERY_S
        while time.monotonic() < ask_again_s:
            if has_daemon(store):
                return
            time.sleep(POLL_S)
        with contextlib.suppress(CloudUnavailable):  # the loop checks the store again
            if controller.has_ended():
                if _is_over(store):
                    return  # the daemon had nothing left to do
                _refuse_ended(controller, store)
    late = f"did not take the run within {DAEMON_TIMEOUT_S / 60:.0f} min; see `sky logs {controller.cluster}`"
    raise Stop(f"the daemon on {controller.cluster} {late}", exit_codes.FAILED)


def _refuse_ended(controller: RemoteController, store: Store) -> None:
    """Raise Stop if the remote daemon has exited for good and the run is not over."""
    if has_daemon(store) or not controller.has_ended() or has_daemon(store) or _is_over(store):
        return
    details = f"its last log lines: {controller.last_log_line()}; see `sky logs {controller.cluster}`"
    raise Stop(f"the daemon on {controller.cluster} exited before the run ended; {details}", exit_codes.FAILED)
