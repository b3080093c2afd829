"""Notifications: the messages made from journal entries, and the channels that deliver them, apprise or a command.

Each delivery runs in its own process group, which is killed at its time limit, so that a slow name server, mail
server or user script cannot delay the daemon.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from grpo_orch.checkpoint.journal import Record
from grpo_orch.policies.model.events import (
    BudgetNeared,
    BudgetReached,
    CapacityShortage,
    DeadlineMissed,
    Event,
    RollbackStarted,
    RunMoved,
)
from grpo_orch.policies.model.vocabulary import RunPhase

TEXT_MAX = 1000  # characters, so that a message stays readable at a glance
_PHASES = {
    RunPhase.FINISHED: "finished",
    RunPhase.FAILED: "failed",
    RunPhase.PAUSED: "is paused",
    RunPhase.GAVE_UP: "gave up",
    RunPhase.PARKED: "is parked",
}


@dataclass(frozen=True, slots=True)
class Message:
    """A notification. Its `id` stays the same when it is delivered again."""

    id: str
    number: int  # of the journal entry
    time_s: float  # of the journal entry, seconds since the epoch
    run: str
    store: str
    kind: str  # as docs/monitoring.md lists them
    text: str  # one line


def messages_in(record: Record, run: str, run_id: str, store: str) -> Iterator[Message]:
    """Yield the messages of a journal entry; most entries have none. Raises Corrupt."""
    for index, event in enumerate(record.decoded()):
        if (found := _message_of(event)) is not None:
            kind, text = found
            line = f"{run} {' '.join(text.split())[:TEXT_MAX]}"
            yield Message(
                f"{run_id}/{record.number}.{index}", record.number, record.time_s, run, store, kind, line
            )


def _message_of(event: Event) -> tuple[str, str] | None:
    """Return the kind and text of an event's message; None for an event that needs no notification."""
    match event:
        case RunMoved() if event.phase in _PHASES:
            return f"{event.phase}", f"{_PHASES[event.phase]}: {event.reason}"
        case RunMoved(phase=RunPhase.STARTING, parked_s=parked_s) if parked_s is not None:
            return "unparked", f"is no longer parked: {event.reason}"
        case RollbackStarted():
            target = f"step {event.fork.start_at}, on timeline {event.fork.timeline}"
            return "rollback", f"rolls back from step {event.from_step} to {target}: {event.reason}"
        case CapacityShortage():
            return "no_capacity", f"is waiting for machines: {event.reason}"
        case DeadlineMissed():
            return "deadline_missed", f"is at step {event.step} of {event.steps} and will miss its deadline"
        case BudgetNeared():
            return "budget_neared", f"has spent {event.spent_usd:.2f} of its {event.usd:.2f} USD"
        case BudgetReached():
            action = "pauses" if event.at == "pause" else "shuts down"
            return "budget_reached", f"has reached its budget and {action}: {event.reason}"
        case _:
            return None


# Channels.

# apprise's command line, from this environment.
_APPRISE = (sys.executable, "-c", "from apprise.cli import main; main()", "-v", "--storage-mode=memory")
_TYPES = {"finished": "success", "failed": "failure", "gave_up": "failure", "unparked": "info"}
_SECRET_LENGTH_MIN = 4  # shorter parts of a URL are ports or paths such as `v1`
_TIMESTAMP = re.compile(r"^[-\d]+ [\d:,]+ - ")


EXPECTED_SERVICE_URL = (
    "not a URL that apprise supports; expected one such as slack://TOKEN_A/TOKEN_B/TOKEN_C, "
    "mailto://USER:PASSWORD@HOST or json://HOST/PATH (see https://appriseit.com/services)"
)


class DeliveryFailed(Exception):
    """A message was not delivered, or may not have been. The reason contains no URL, because URLs are secret."""


class Channel(Protocol):
    """A way to deliver messages. `name` is its key in the cursor."""

    name: str

    def deliver(self, message: Message, limit_s: float, /) -> None:
        """Deliver within `limit_s` seconds. Raises DeliveryFailed."""


class Service:
    """Sends through apprise.

    Args:
        variable: the environment variable that holds the URL; the channel's name.
        url: an apprise URL, such as `slack://...`, `mailto://...` or `json://host/path`.
    """

    def __init__(self, variable: str, url: str) -> None:
        self.name = variable
        self._url = url

    def deliver(self, message: Message, limit_s: float) -> None:
        kind = _TYPES.get(message.kind, "warning")
        argv = (*_APPRISE, f"--notification-type={kind}")
        # In the environment, because other users can read a process' arguments.
        environment = {**os.environ, "APPRISE_URLS": self._url}
        body = f"{message.text} ({message.id})".encode()
        status, output = _run(self.name, argv, body, limit_s, env=environment, stdout=subprocess.PIPE)
        if status != 0:
            raise DeliveryFailed(f"{self.name}: {self._reason(output, status)}")

    def _reason(self, output: bytes, status: int) -> str:
        """Return apprise's last line without any part of the URL."""
        lines = output.decode(errors="replace").strip().splitlines()
        if not lines:
            return f"apprise returned {status}"
        reason = _TIMESTAMP.sub("", lines[-1])
        for part in re.split(r"[/:@?&=,\s]+", self._url):
            if len(part) >= _SECRET_LENGTH_MIN:
                reason = reason.replace(part, "***")
        return reason


def is_service_url(url: str) -> bool:
    """Return whether apprise can send to this URL, without sending anything."""
    import apprise  # takes half a second, and few commands need it

    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # its messages quote the URL
    return apprise.Apprise.instantiate(url, suppress_exceptions=True) is not None


class Command:
    """Runs a program with the message as one line of JSON on its standard input. Exit code 0 means delivered.

    Args:
        argv: the program and its arguments, run without a shell.
        folder: the working directory; None for the daemon's.
    """

    name = "command"

    def __init__(self, argv: tuple[str, ...], folder: str | None = None) -> None:
        self._argv = argv
        self._folder = folder

    def deliver(self, message: Message, limit_s: float) -> None:
        line = json.dumps(asdict(message)).encode() + b"\n"
        status, _ = _run(self._argv[0], self._argv, line, limit_s, cwd=self._folder)
        if status != 0:
            raise DeliveryFailed(f"{self._argv[0]} ended with exit code {status}")


def _run(
    name: str,
    argv: Sequence[str],
    stdin: bytes,
    limit_s: float,
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: int = subprocess.DEVNULL,
) -> tuple[int, bytes]:
    """Run a program in its own process group; return its exit code and its output.

    Raises DeliveryFailed if it cannot be started or does not end within `limit_s`.
    """
    try:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise DeliveryFailed(f"{name}: {getattr(error, 'strerror', None) or error}") from None
    try:
        output, _ = process.communicate(stdin, timeout=limit_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise DeliveryFailed(f"{name} did not finish within {limit_s:.0f} s") from None
    return process.returncode, output or b""
