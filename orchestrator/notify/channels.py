"""Notifications: which journal entries become messages, and the channels that deliver them, apprise or a command.

Each delivery is a process of its own, which is killed with its group at its time limit: neither a name server
nor a mail server nor a user's script can hold up the daemon.
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

from checkpoint.journal import Record
from policies.model.events import (
    BudgetNeared,
    BudgetReached,
    CapacityMissing,
    DeadlineMissed,
    Event,
    RollbackBegun,
    RunMoved,
)
from policies.model.vocabulary import RunPhase

LONGEST = 1000  # characters of a reason: a glance
_TOLD = {
    RunPhase.FINISHED: "finished",
    RunPhase.FAILED: "failed",
    RunPhase.PAUSED: "is paused",
    RunPhase.GAVE_UP: "gave up",
    RunPhase.PARKED: "is parked",
}


@dataclass(frozen=True, slots=True)
class Message:
    """One thing to tell. The same event always has the same `id`, however often it is told."""

    id: str
    number: int  # of the journal entry
    time_s: float  # seconds since the epoch, when it was journalled
    run: str
    store: str
    kind: str  # as docs/monitoring.md lists them
    text: str  # one line


def messages_in(record: Record, run: str, run_id: str, store: str) -> Iterator[Message]:
    """The messages of a journal entry; of most entries there is none. Raises Corrupt."""
    for index, event in enumerate(record.decoded()):
        if (told := _told(event)) is not None:
            kind, text = told
            shown = f"{run} {' '.join(text.split())[:LONGEST]}"
            yield Message(
                f"{run_id}/{record.number}.{index}", record.number, record.time_s, run, store, kind, shown
            )


def _told(event: Event) -> tuple[str, str] | None:
    """Kind and text; None for what can wait until somebody looks."""
    match event:
        case RunMoved() if event.phase in _TOLD:
            return f"{event.phase}", f"{_TOLD[event.phase]}: {event.reason}"
        case RunMoved(phase=RunPhase.STARTING, parked_s=parked_s) if parked_s is not None:
            return "unparked", f"is no longer parked: {event.reason}"
        case RollbackBegun():
            whereto = f"timeline {event.fork.timeline} from step {event.fork.start_at}"
            return "rollback", f"is rolled back at step {event.from_step}, to {whereto}: {event.reason}"
        case CapacityMissing():
            return "no_capacity", f"waits: {event.reason}"
        case DeadlineMissed():
            return "deadline_missed", f"is at step {event.step} of {event.steps} and misses its deadline"
        case BudgetNeared():
            return "budget_neared", f"has spent {event.spent_usd:.2f} of its {event.usd:.2f} USD"
        case BudgetReached():
            return "budget_reached", f"has reached its budget and is to {event.at}: {event.reason}"
        case _:
            return None


# Channels.

# apprise's own command line, from this environment.
_APPRISE = (sys.executable, "-c", "from apprise.cli import main; main()", "-v", "--storage-mode=memory")
_TYPES = {"finished": "success", "failed": "failure", "gave_up": "failure", "unparked": "info"}
_SECRET_LENGTH_MIN = 4  # parts of a URL that short are ports, paths like `v1` and the like
_TIMESTAMP = re.compile(r"^[-\d]+ [\d:,]+ - ")


EXPECTED_SERVICE_URL = (
    "not a URL that apprise knows; expected one such as slack://TOKEN_A/TOKEN_B/TOKEN_C, "
    "mailto://USER:PASSWORD@HOST or json://HOST/PATH, as https://appriseit.com/services lists them"
)


class Undelivered(Exception):
    """A message was not delivered, or may not have been. The reason quotes no URL, which is a secret."""


class Channel(Protocol):
    """One way to reach people. `name` is its key in the cursor."""

    name: str

    def deliver(self, message: Message, limit_s: float, /) -> None:
        """Deliver within `limit_s` seconds. Raises Undelivered."""


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
            raise Undelivered(f"{self.name}: {self._reason(output, status)}")

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
    """Return whether apprise can send to this URL. Nothing is sent."""
    import apprise  # half a second, for the few commands that need it

    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # its messages quote the URL
    return apprise.Apprise.instantiate(url, suppress_exceptions=True) is not None


class Command:
    """Runs a program with the message as one line of JSON on its standard input. Exit code 0 means delivered.

    Args:
        argv: the program and its arguments; no shell is involved.
        folder: the working folder; None for the daemon's own.
    """

    name = "command"

    def __init__(self, argv: tuple[str, ...], folder: str | None = None) -> None:
        self._argv = argv
        self._folder = folder

    def deliver(self, message: Message, limit_s: float) -> None:
        line = json.dumps(asdict(message)).encode() + b"\n"
        status, _ = _run(self._argv[0], self._argv, line, limit_s, cwd=self._folder)
        if status != 0:
            raise Undelivered(f"{self._argv[0]} ended with exit code {status}")


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
    """Run a program in a process group of its own; return its exit code and its output.

    Raises Undelivered if it cannot be started or does not end within `limit_s`.
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
        raise Undelivered(f"{name}: {getattr(error, 'strerror', None) or error}") from None
    try:
        output, _ = process.communicate(stdin, timeout=limit_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise Undelivered(f"{name} did not finish within {limit_s:.0f} s") from None
    return process.returncode, output or b""
