"""Reward function that runs a model's programs in a sandbox and scores the tests they pass."""

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

from grpo_orch.tasks.rewards import sandboxed
from grpo_orch.tasks.rewards.in_workers import WALL_FACTOR, run_samples
from grpo_orch.tasks.rewards.pool import Limits, NoWorker, Pool
from grpo_orch.tasks.rewards.texts import answer_of, fenced, text_of

# The sandbox: bubblewrap namespaces around `tasks.rewards.sandboxed`.
#
# It contains only Python and /usr, read-only: no home, environment, /proc, network, other processes, or writable
# folder. Without a sandbox no program runs, since it would reach the trainer's keys, its store and the cloud's
# metadata server.

# User ids of sandboxes started as root. The kernel limits processes by user, and does not limit root's. The range
# lies between those of people and systemd (systemd's UIDS-GIDS.md). Each trainer process starts elsewhere in it,
# since sandboxes with the same user would share one limit of threads.
USERS = range(30_000, 60_000)
USER_STRIDE = 7_919  # a prime, since process ids are close to each other
SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")
INSIDE = "/sandboxed.py"
INSTALL = "add `apt-get install -y bubblewrap` to trainer.setup (with sudo unless it runs as root)"

_started = itertools.count()


@functools.cache
def sandboxes() -> Pool:
    """Return the pool of sandboxes, which start with the first sample."""
    return Pool(_start)


def next_user() -> int:
    """Return a user id that no running sandbox of this or another trainer process has."""
    return USERS[(os.getpid() * USER_STRIDE + next(_started)) % len(USERS)]


def sandbox_command(bwrap: str, user: int) -> list[str]:
    """Return the command line of one sandbox.

    Args:
        user: user id inside the sandbox if this process runs as root; otherwise its own user is kept.
    """
    python = Path(sys.executable).resolve()  # a virtual environment has only links
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
        # Parent folders that bubblewrap creates implicitly are not accessible to `user`.
        for parent in reversed(Path(sys.base_prefix).parents[:-1]):
            argv += ["--dir", str(parent)]
        argv += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    argv += ["--dir", "/dev", "--dev-bind", "/dev/null", "/dev/null"]
    argv += ["--ro-bind", sandboxed.__file__, INSIDE, "--remount-ro", "/"]
    return [*argv, "--chdir", "/", str(python), "-I", "-S", INSIDE, str(user)]


def _start() -> subprocess.Popen[bytes]:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise NoWorker(f"cannot run programs in a sandbox: bwrap is not installed; {INSTALL}")
    argv = sandbox_command(bwrap, next_user())
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, env={}, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)


LIMIT_S = 2  # CPU time of one test; the wall time limit is five times this
MEMORY_BYTES = 512 << 20
THREADS = 16
OUTPUT_BYTES = 1 << 20
PROGRAM_CHARACTERS = 100_000  # a longer program fails: a deeply nested one takes long to compile
MARGIN_S = 60.0  # for a busy machine; the sandbox enforces the limits of its programs itself

Test = dict[str, str]


def code_tests(
    completions: Sequence[Any], column: str = "tests", limit_s: int = LIMIT_S, **columns: Any
) -> list[float | None]:
    """Score the share of tests that a completion's program passes; None if the row has no tests.

    The program is the last code block of three backquotes after the reasoning, or else all the text. After a test
    that exceeds its time limit the remaining tests count as failed.

    Args:
        column: dataset column with a list of tests or its JSON. A test is a mapping of `input`, the program's
            stdin, and `output`, its expected stdout, where spaces at the ends of lines are ignored; or a statement
            such as `assert double(2) == 4`. APPS' format, a mapping of lists `inputs` and `outputs`, works, too.
        limit_s: CPU time of one test, in whole seconds.

    Raises TypeError, ValueError for invalid tests or an invalid limit; NoWorker if no sandbox is available.
    """
    if column not in columns:
        raise TypeError(f"code_tests needs a column `{column}`; set its argument `column` to use another one")
    if isinstance(limit_s, bool) or not isinstance(limit_s, int) or limit_s < 1:  # RLIMIT_CPU has whole seconds
        raise ValueError(f"code_tests: expected limit_s as a whole number of seconds, at least 1, got {limit_s!r}")
    all_tests = [[] if tests is None else _tests(tests) for tests in columns[column]]
    wall_s = int(WALL_FACTOR * limit_s)
    limits = {"cpu_s": limit_s, "wall_s": wall_s, "memory_bytes": MEMORY_BYTES}
    limits |= {"threads": THREADS, "output_bytes": OUTPUT_BYTES}
    samples = [
        {
            "program": _program(text_of(completion)),
            # Without the expected output: a program in the sandbox could find it.
            "tests": [{name: value for name, value in test.items() if name != "output"} for test in tests],
            "limits": limits,
        }
        for completion, tests in zip(completions, all_tests, strict=True)
    ]
    tests_max = max((len(tests) for tests in all_tests), default=0)
    timeout_s = tests_max * wall_s + MARGIN_S
    answers = run_samples(
        "code_tests", sandboxes(), samples, Limits(timeout_s, timeout_s), completions, columns.get("log_metric")
    )
    results = zip(all_tests, answers, strict=True)
    return [_share(tests, answer.value or []) if tests else None for tests, answer in results]


def _program(text: str) -> str:
    answer = answer_of(text)
    block = fenced(answer)
    program = answer if block is None else block
    return program if len(program) <= PROGRAM_CHARACTERS else "raise MemoryError"


def _tests(value: Any) -> list[Test]:
    """Normalize a row's tests. Raises TypeError, ValueError for an unknown format."""
    value = json.loads(value) if isinstance(value, str) else value
    if isinstance(value, dict) and {"inputs", "outputs"} <= value.keys():
        value = [{"input": a, "output": b} for a, b in zip(value["inputs"], value["outputs"], strict=True)]
    if not isinstance(value, list):
        raise TypeError(f"code_tests: expected a list of tests, got {type(value).__name__}")
    return [_test(test) for test in value]


def _test(value: Any) -> Test:
    match value:
        case str():
            return {"assertion": value}
        case {"input": str() as stdin, "output": str() as output}:
            return {"input": stdin, "output": output}
    expected = "expected a test to be a statement, or a mapping with texts `input` and `output`"
    raise ValueError(f"code_tests: {expected}, got {str(value)[:60]!r}")


def _share(tests: Sequence[Test], results: Sequence[dict[str, Any]]) -> float:
    return sum(map(_passed, tests, results)) / len(tests)


def _passed(test: Test, result: dict[str, Any]) -> bool:
    if "assertion" in test:
        return bool(result["ended"])
    return bool(result["ended"]) and _lines(result["output"]) == _lines(test["output"])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
