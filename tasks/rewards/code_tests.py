"""Programs that a model wrote, by the tests that they pass, in a sandbox."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.rewards import sandboxed
from tasks.rewards.in_workers import WALL_FACTOR, answered
from tasks.rewards.pool import Limits, NoWorker, Pool
from tasks.rewards.texts import answer_of, fenced, text_of

# The sandbox in which programs that a model wrote are run: bubblewrap's namespaces around
# `tasks.rewards.sandboxed`.
#
# Inside there is Python and /usr, all read-only, and nothing else of the machine: no home, no environment, no
# /proc, no network, no other process, no folder to write to. Where no such sandbox can be had, nothing is run: a
# program that a model wrote would find the trainer's keys, its store and the cloud's metadata server.

# Of this range each sandbox takes the next, where it starts as root: the kernel counts processes by user, and
# counts none of root's. It lies between people's and systemd's own (systemd's UIDS-GIDS.md). The trainer's other
# processes begin elsewhere in it: a program would be refused its threads for what another one's has started.
USERS = range(30_000, 60_000)
APART = 7_919  # a prime: process ids are near each other
SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")
INSIDE = "/sandboxed.py"
INSTALL = "add `apt-get install -y bubblewrap` to trainer.setup, with sudo where that is not root's"

_started = itertools.count()


@functools.cache
def sandboxes() -> Pool:
    """Sandboxes that answer samples as `sandboxed` does. They start with the first of them."""
    return Pool(_start, at_once=1)  # a program could read those that wait beside it, a right one among them


def next_user() -> int:
    """A user id that no sandbox has which runs now, of this process or of another."""
    return USERS[(os.getpid() * APART + next(_started)) % len(USERS)]


def sandbox_command(bwrap: str, user: int) -> list[str]:
    """The command of one sandbox.

    Args:
        user: whose processes those inside are, where this process is root's; else they are its own user's.
    """
    python = Path(sys.executable).resolve()  # an environment has links to it
    argv = [bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    argv += ["--die-with-parent", "--as-pid-1", "--new-session", "--clearenv", "--setenv", "PYTHONHASHSEED", "0"]
    argv += ["--cap-drop", "ALL"]
    if os.geteuid() == 0:
        argv += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # until it is `user`
    else:
        argv.append("--unshare-user")
    argv += ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for folder in SYSTEM:
        if os.path.islink(folder):
            argv += ["--symlink", os.readlink(folder), folder]
        else:
            argv += ["--ro-bind-try", folder, folder]
    if not sys.base_prefix.startswith("/usr"):
        # Folders that bubblewrap makes on the way, and is not told of, are closed to `user`.
        for parent in reversed(Path(sys.base_prefix).parents[:-1]):
            argv += ["--dir", str(parent)]
        argv += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    argv += ["--dir", "/dev", "--dev-bind", "/dev/null", "/dev/null"]
    argv += ["--ro-bind", sandboxed.__file__, INSIDE, "--remount-ro", "/"]
    return [*argv, "--chdir", "/", str(python), "-I", "-S", INSIDE, str(user)]


def _start() -> subprocess.Popen[bytes]:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise NoWorker(f"no sandbox for programs: bwrap is not installed; {INSTALL}")
    argv = sandbox_command(bwrap, next_user())
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, env={}, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)


LIMIT_S = 2  # CPU time of one test; five times as long by the clock
MEMORY_BYTES = 512 << 20
THREADS = 16
OUTPUT_BYTES = 1 << 20
PROGRAM_CHARACTERS = 100_000  # a longer one fails: compiling it takes the longer the more it is nested
MARGIN_S = 60.0  # for a sandbox on a busy machine; it ends its programs by itself

Test = dict[str, str]


def code_tests(
    completions: Sequence[Any], column: str = "tests", limit_s: int = LIMIT_S, **columns: Any
) -> list[float | None]:
    """The share of the tests that a completion's program passes; None where the dataset has no test.

    The program is the last code block of three backquotes after the thoughts, or all that is there. After a test
    that takes too long the others count as failed.

    Args:
        column: of the dataset, with a list or its JSON. A test is a mapping with `input`, what the program reads,
            and `output`, what it should print, spaces at the ends of lines aside; or a statement, as
            `assert double(2) == 4`. APPS' form, a mapping of lists `inputs` and `outputs`, is read, too.
        limit_s: CPU time of one test, in whole seconds.

    Raises ValueError for tests that are none, and another limit; NoWorker where there is no sandbox.
    """
    if column not in columns:
        raise TypeError(f"code_tests needs a column `{column}`; name another as its argument `column`")
    if isinstance(limit_s, bool) or not isinstance(limit_s, int) or limit_s < 1:  # the kernel's is in whole ones
        raise ValueError(f"code_tests: expected limit_s as a whole number of seconds, at least 1, got {limit_s!r}")
    all_tests = [[] if one is None else _tests(one) for one in columns[column]]
    wall_s = int(WALL_FACTOR * limit_s)
    limits = {"cpu_s": limit_s, "wall_s": wall_s, "memory_bytes": MEMORY_BYTES}
    limits |= {"threads": THREADS, "output_bytes": OUTPUT_BYTES}
    samples = [
        {"program": _program(text_of(one)), "tests": [_without_output(test) for test in tests], "limits": limits}
        for one, tests in zip(completions, all_tests, strict=True)
    ]
    most_tests = max((len(tests) for tests in all_tests), default=0)
    within_s = most_tests * wall_s + MARGIN_S
    answers = answered(
        "code_tests", sandboxes(), samples, Limits(within_s, within_s), completions, columns.get("log_metric")
    )
    tried = zip(all_tests, answers, strict=True)
    return [_share(tests, answer.value or []) if tests else None for tests, answer in tried]


def _program(text: str) -> str:
    answer = answer_of(text)
    block = fenced(answer)
    program = answer if block is None else block
    return program if len(program) <= PROGRAM_CHARACTERS else "raise MemoryError"


def _tests(told: Any) -> list[Test]:
    """A dataset's tests in one form. Raises TypeError, ValueError for what is none of those that are read."""
    told = json.loads(told) if isinstance(told, str) else told
    if isinstance(told, dict) and {"inputs", "outputs"} <= told.keys():
        told = [{"input": a, "output": b} for a, b in zip(told["inputs"], told["outputs"], strict=True)]
    if not isinstance(told, list):
        raise TypeError(f"code_tests: expected a list of tests, got {type(told).__name__}")
    return [_test(one) for one in told]


def _test(one: Any) -> Test:
    match one:
        case str():
            return {"assertion": one}
        case {"input": str() as given, "output": str() as output}:
            return {"input": given, "output": output}
    expected = "a test is a statement, or has texts `input` and `output`"
    raise ValueError(f"code_tests: {expected}, got {str(one)[:60]!r}")


def _without_output(test: Test) -> Test:
    """What the sandbox is told: a program cannot look for what it does not hold."""
    return {name: value for name, value in test.items() if name != "output"}


def _share(tests: Sequence[Test], results: Sequence[dict[str, Any]]) -> float:
    return sum(map(_passed, tests, results)) / len(tests)


def _passed(test: Test, result: dict[str, Any]) -> bool:
    if "assertion" in test:
        return bool(result["ended"])
    return bool(result["ended"]) and _lines(result["output"]) == _lines(test["output"])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
