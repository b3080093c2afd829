"""Programs that models write earn their share of the tests, and reach nothing outside."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_orch.rewards import code_tests
from grpo_orch.tasks.rewards.code_tests import sandboxes
from grpo_orch.tasks.rewards.in_workers import WALL_FACTOR
from grpo_orch.tasks.rewards.pool import Limits, NoWorker
from tests.budget import HANG_S

DOUBLE = "Sure:\n```python\nprint(int(input()) * 2)\n```\nThat doubles."
PAIR = [{"input": "3\n", "output": "6\n"}, {"input": "4", "output": "9"}]

LONG_S = int(HANG_S / WALL_FACTOR)  # CPU time, for programs that end: by the clock they may take long
REACHES = "import socket\ntry:\n    {}\nexcept OSError:\n    print('no')"

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed: make test-packages")


def share(program: str, *tests: Any) -> float | None:
    return code_tests([program], tests=[list(tests)], limit_s=LONG_S)[0]


def passes(program: str, output: str = "") -> bool:
    """Whether a program ends as it should and prints this."""
    return share(program, {"input": "", "output": output}) == 1.0


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        (PAIR, 0.5),
        (json.dumps(PAIR), 0.5),
        ({"inputs": ["3", "5"], "outputs": ["6  \n\n", "10"]}, 1.0),
        ([], None),
        (None, None),  # a row of another dataset
    ],
)
def test_tests_in_every_form(tests: Any, expected: float | None) -> None:
    assert code_tests([DOUBLE], tests=[tests]) == [expected]


def test_statements_are_tests_too() -> None:
    program = "def double(x):\n    return x * 2"
    assert share(program, "assert double(2) == 4", "assert double(2) == 5", "assert double('a') == 'aa'") == 2 / 3


@pytest.mark.parametrize(
    "program",
    [
        "print(1)\nexit()",
        "print(1)\nquit(0)",
        "import threading, time\ndef main():\n    time.sleep(0.1)\n    print(1)\n"
        "threading.Thread(target=main).start()",
        "import atexit, io, os, sys\nsys.stdout = io.StringIO()\n"
        "atexit.register(lambda: os.write(1, sys.stdout.getvalue().encode()))\nprint(1)",
        "import sys\nsys.__stdout__.write('1')",
        "from dataclasses import dataclass, fields\nfrom typing import ClassVar\n"
        "@dataclass\nclass A:\n    x: int\n    n: ClassVar[int] = 0\nprint(len(fields(A)))",
        "def f(x: int): ...\nprint(int(f.__annotations__ == {'x': int}))",
        "import pickle\nclass A: pass\nprint(int(isinstance(pickle.loads(pickle.dumps(A())), A)))",
    ],
)
def test_a_program_runs_as_under_python_itself(program: str) -> None:
    assert passes(program, "1")


@pytest.mark.parametrize("limit_s", [0, -1, 0.5, 2.5, "2", True])
def test_a_limit_that_the_kernel_cannot_have_is_told(limit_s: Any) -> None:
    with pytest.raises(ValueError, match="code_tests: expected limit_s as a whole number of seconds"):
        code_tests(["print(1)"], tests=[PAIR], limit_s=limit_s)


def test_chats_and_thoughts() -> None:
    chat = [{"role": "assistant", "content": f"<think>\n```\nexit()\n```\n</think>{DOUBLE}"}]
    assert code_tests([chat, "<think>\n" + DOUBLE], tests=[PAIR[:1]] * 2) == [1.0, 0.0]


@pytest.mark.parametrize("tests", [7, [7], [{"input": "x"}], [{"input": 1, "output": "1"}]])
def test_what_is_no_test_is_told(tests: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="code_tests: "):
        code_tests(["print()"], tests=[tests])


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(1e6)",
        "import os\nwhile True:\n    os.fork()",
        "import os\nwhile True:\n    if os.fork() == 0:\n        while True: pass",
        "import threading\nwhile True: threading.Thread(target=input).start()",
        "while True: print('x' * 10_000)",
        "x = [0]\nwhile True: x += x",
        "b = bytearray(1 << 34)",
        "import os; os.abort()",
        "import os; os.kill(os.getppid(), 9); os.kill(-1, 9)",
        "import os; os.kill(1, 2); os._exit(0)",
        "import sys; sys.exit(3) if sys.setrecursionlimit(10**9) else (lambda f: f(f))(lambda f: f(f))",
        "(" * 50_000,
        "{" * 10_000_000,
        "-" * 90_000 + "1",
        "eval('1' + '+1' * 100_000)",
        "print('\ud800')",
        "\0",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nx = bytearray(1 << 33)",
    ],
)
def test_what_harms_the_machine_fails_alone(program: str) -> None:
    tests = [[{"input": "", "output": "1"}]] * 3
    assert code_tests(["print(1)", program, "print(1)"], tests=tests, limit_s=1) == [1.0, 0.0, 1.0]


def test_nothing_of_a_program_is_left() -> None:
    linger = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1e6)"
    sandboxes().close()
    others = psutil.Process().children(recursive=True)  # servers that tests share, which stay
    assert not passes(linger), "it has not ended before what it has started"
    started = set(psutil.Process().children(recursive=True)).difference(others)
    sandboxes().close()
    assert started
    assert not psutil.wait_procs(started, timeout=HANG_S)[1]
    assert passes("import os\ntry:\n    os.kill(-1, 0)\nexcept ProcessLookupError:\n    print('alone')", "alone")


def test_a_program_ends_with_the_trainer_that_was_killed() -> None:
    sleeps = "from grpo_orch.rewards import code_tests\n"
    sleeps += "code_tests(['import time; time.sleep(1e6)'], tests=[[{'input': '', 'output': ''}]], limit_s=10_000)"
    trainer = psutil.Popen([sys.executable, "-c", sleeps])
    started: list[psutil.Process] = []
    while len(started) < 3:  # bubblewrap, the sandbox's first process, the program
        assert trainer.poll() is None
        started = trainer.children(recursive=True)
    trainer.kill()
    trainer.wait()
    left = psutil.wait_procs(started, timeout=HANG_S)[1]
    for one in left:
        one.kill()
    assert not left


@pytest.fixture
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    sandboxes().close()  # one that starts now would inherit it
    (tmp_path / "key").write_text("hunter2")
    return tmp_path / "key"


@pytest.mark.parametrize(
    "program",
    [
        "import os; assert 'hunter2' not in str(os.environ)",
        "import os; assert not os.path.exists({key!r})",
        "import os; assert not any(map(os.path.exists, ('/proc/self', '/sys', '/home', '/run', '/var')))",
        "import os; assert not os.path.exists('/etc/passwd') and os.listdir('/dev') == ['null']",
        "import os; assert os.getuid() != 0 and os.getpid() != 1",
    ],
)
def test_nothing_outside_can_be_read(program: str, secrets: Path) -> None:
    assert passes(program.replace("{key!r}", repr(str(secrets))))


@pytest.mark.parametrize("folder", ["/", "/tmp", "/dev", "/usr", "/dev/shm", "/var/tmp", os.path.expanduser("~")])
def test_nothing_can_be_written(folder: str) -> None:
    assert passes(f"try:\n    open({folder!r} + '/x', 'w')\nexcept OSError:\n    print('no')", "no")


def test_there_is_no_network_not_even_this_machines_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for address in (("127.0.0.1", port), ("169.254.169.254", 80)):
            assert passes(REACHES.format(f"socket.create_connection({address}, 1)"), "no")
        abstract = socket.socket(socket.AF_UNIX)
        abstract.bind(f"\0sandbox-{os.getpid()}")
        abstract.listen()
        name = f"\\0sandbox-{os.getpid()}"
        assert passes(REACHES.format(f"socket.socket(1).connect('{name}')"), "no")
        abstract.close()


# By their numbers on x86-64: System V's shared memory, a user namespace by unshare and by clone, io_uring, ptrace,
# bpf, x32's getpid; limits, priority and scheduling of the sandbox's first process; processes.
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are x86-64's")
@pytest.mark.parametrize(
    "call",
    [
        "29, 0, 4096, 0o1600",
        "272, 0x10000000",
        "56, 0x10000011, 0, 0, 0, 0",
        "425, 8, 0",
        "101, 16, 1, 0, 0",
        "321, 0, 0, 0",
        "0x40000027",
        "302, 1, 7, 0, 0",
        "141, 0, 1, 19",
        "144, 1, 5, 0",
        "203, 1, 0, 0",
        "314, 1, 0, 0",
        "251, 1, 1, 0",
        "57",
        "58",
        "56, 17, 0, 0, 0, 0",
    ],
)
def test_calls_that_no_program_needs_are_refused(call: str) -> None:
    program = f"import ctypes as c\nprint(c.CDLL(None, use_errno=True).syscall({call}), c.get_errno())"
    assert passes(program, "-1 1")


def test_a_program_cannot_look_for_what_it_should_print() -> None:
    cheat = """
import gc, sys
frame = sys._getframe()
while frame:
    if "gold-" + "4711" in str(frame.f_locals): print("gold-" + "4711")
    frame = frame.f_back
found = [one for one in gc.get_objects() if isinstance(one, (str, list, dict)) and "gold-" + "4711" in str(one)]
if found: print("gold-" + "4711")
"""
    assert not passes(cheat.replace('"gold-" + "4711"', '"gold-" + str(4711)'), "gold-4711")


def test_a_program_cannot_copy_the_one_beside_it() -> None:
    copies = """
import sys
frame, found = sys._getframe(1), ""
while frame:
    found += str(frame.f_locals)
    frame = frame.f_back
if "# neigh" + "bour" in found: print(42)
"""
    programs = ["# neighbour\nprint(42)", copies, "# neighbour\nprint(42)"]
    assert code_tests(programs, tests=[[{"input": "", "output": "42"}]] * 3) == [1.0, 0.0, 1.0]


def test_the_trainers_processes_have_users_of_their_own() -> None:
    tell = [
        sys.executable,
        "-c",
        "from grpo_orch.rewards.code_tests import next_user as n; print(*[n() for _ in range(8)])",
    ]
    users = [user for _ in range(4) for user in subprocess.check_output(tell).split()]
    assert len(set(users)) == 32


def test_too_much_output_is_not_carried_out() -> None:
    limits = {"cpu_s": 2, "wall_s": 10, "memory_bytes": 512 << 20, "threads": 16, "output_bytes": 100}
    sample = {"program": "print('x' * 200)", "tests": [{"input": ""}], "limits": limits}
    (answer,) = sandboxes().map([sample], Limits(HANG_S, HANG_S))
    assert answer.value == [{"ended": False, "output": "", "why": "output"}]


@pytest.mark.parametrize("cheat", ["import os; os._exit(0)", "raise SystemExit(0)", "import sys; sys.exit()"])
def test_to_end_early_passes_no_statement(cheat: str) -> None:
    assert share(cheat, "assert False") == 0.0


def test_a_program_has_threads_and_no_further_process() -> None:
    threads = (
        "import threading as t\na = [t.Thread(target=print, args=(1,), kwargs={'end': ''}) for _ in range(9)]"
    )
    assert passes(f"{threads}\nfor one in a: one.start()", "1" * 9)
    assert passes("import os\ntry:\n    os.fork()\nexcept PermissionError:\n    print('no')", "no")
    assert passes(
        "import subprocess\ntry:\n    subprocess.run('ls')\nexcept PermissionError:\n    print('no')", "no"
    )
    limit = "import resource as r\nr.setrlimit(r.RLIMIT_CPU, (1, 1))\nprint(r.getrlimit(r.RLIMIT_CPU))"
    assert passes(limit, "(1, 1)")


def test_one_test_leaves_nothing_to_the_next() -> None:
    program = "import builtins\nprint(getattr(builtins, 'left', 'clean'))\nbuiltins.left = 'dirty'"
    clean = {"input": "", "output": "clean"}
    assert code_tests([program, program], tests=[[clean] * 3] * 2) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("bwrap", "says"),
    [
        ("#!/bin/sh\necho 'bwrap: No permissions' >&2; exit 1\n", "bwrap: No permissions"),
        ("", "bwrap is not installed"),
    ],
)
def test_without_a_sandbox_nothing_is_run(
    bwrap: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bwrap:
        (tmp_path / "bwrap").write_text(bwrap)
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    sandboxes().close()
    with pytest.raises(NoWorker, match=f"^code_tests: .*{says}"):
        share("print(1)", PAIR[0])
