"""First process inside the sandbox: runs each program in a forked process.

Python runs this file on its own, so it cannot import this project. `code_tests` starts it without a writable file
system, a network or other processes. A forked process also gets irrevocable limits of CPU time, memory, files and
threads, and a filter of system calls. It cannot affect the first process, which reports its result: it has none of
its pipes, may not trace it, and cannot signal the first process of a namespace.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import importlib
import json
import os
import platform
import resource
import secrets
import select
import signal
import struct
import sys
import threading
import time
import types
from typing import Any

# Common imports of programs, loaded before the fork.
COMMON = (
    "bisect collections copy datetime decimal fractions functools heapq io itertools math operator queue random re"
)
COMMON += " statistics string threading typing"
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38  # linux/prctl.h
SECCOMP_MODE_FILTER = 2
VERDICT_BYTES = 16
OPEN_FILES_MAX = 64
# By architecture: its id in audit.h, the numbers of clone and prlimit64, and the denied system calls
# (asm/unistd.h). These create objects that outlive their process, or give access a program does not need: System V
# and POSIX shared objects, keys, namespaces, mounts, tracing, BPF, asynchronous I/O, memory and scheduling of
# other processes, which the first process would pass on to the next program.
DENIED = {
    "x86_64": (
        0xC000003E,
        56,
        302,
        (29, 30, 64, 66, 68, 71, 101, 141, 142, 144, 155, 161, 165, 166, 175, 203, 240, 246, 248, 249, 250, 251,
         256, 272, 279, 298, 304, 308, 310, 311, 313, 314, 317, 320, 321, 323, 425, 426, 427, 428, 429, 430, 432,
         434, 438, 440, 442, 447),
    ),
    "aarch64": (
        0xC00000B7,
        220,
        261,
        (30, 39, 40, 41, 51, 97, 104, 105, 117, 118, 119, 122, 140, 180, 186, 190, 194, 196, 217, 218, 219, 238,
         239, 241, 265, 268, 270, 271, 273, 274, 277, 280, 282, 294, 425, 426, 427, 428, 429, 430, 432, 434, 438,
         440, 442, 447),
    ),
}  # fmt: skip
X32 = 0x40000000  # first number of x86-64's second set of system calls
CLONE3 = 435  # its flags are in memory, which a filter cannot read; clone's are in its first argument
NAMESPACES = 0x7E020000  # clone's flags that create namespaces (linux/sched.h)
CLONE_THREAD = 0x10000
FORKS = (57, 58) if platform.machine() == "x86_64" else ()  # fork and vfork; other architectures have only clone
# linux/seccomp.h. Without clone3, libraries use clone.
ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/bpf_common.h
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    uid = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # for the first process of a namespace this ignores SIGINT
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _must(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _must(_libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
    _deny_calls()
    for name in COMMON.split():
        importlib.import_module(name)
    for name in ("exit", "quit"):  # programs use them, but only `site` defines them
        setattr(builtins, name, sys.exit)
    sys.argv[:] = ["completion.py"]
    print("null", flush=True)
    for line in sys.stdin:
        print(json.dumps(["scored", _run_tests(**json.loads(line)), ""]), flush=True)


def _run_tests(program: str, tests: list[dict[str, str]], limits: dict[str, int]) -> list[dict[str, Any]]:
    """Return each test's output and whether it completed. Stops after a test that exceeds its time limit."""
    results = []
    for test in tests:
        results.append(_run_test(program, test, limits))
        if results[-1]["why"] == "time":
            break
    return results


def _run_test(program: str, test: dict[str, str], limits: dict[str, int]) -> dict[str, Any]:
    stdin = os.memfd_create("input", 0)
    _write_all(stdin, test.get("input", "").encode(errors="surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    output, output_end = os.pipe()
    verdict, verdict_end = os.pipe()
    expected = secrets.token_bytes(VERDICT_BYTES)
    child = os.fork()
    if child == 0:
        _become(program, test.get("assertion", ""), stdin, output_end, verdict_end, expected, limits)
    for descriptor in (stdin, output_end, verdict_end):
        os.close(descriptor)
    printed, why = _read(output, limits["output_bytes"], limits["wall_s"])
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # the child and its descendants
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    os.set_blocking(verdict, False)
    received = b""
    with contextlib.suppress(BlockingIOError):
        received = os.read(verdict, VERDICT_BYTES + 1)
    os.close(output)
    os.close(verdict)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        why = "time"
    return {"ended": not why and received == expected, "output": printed.decode(errors="replace"), "why": why}


def _read(output: int, bytes_max: int, wall_s: float) -> tuple[bytes, str]:
    """Read a program's output to its end or a limit. Returns the name of the limit, empty at the end."""
    deadline_s, printed = time.monotonic() + wall_s, bytearray()
    while len(printed) <= bytes_max:
        left_s = deadline_s - time.monotonic()
        ready = select.select([output, 0], [], [], left_s)[0] if left_s > 0 else []
        if 0 in ready:  # no sample is sent before the answer, so the trainer has ended
            os._exit(1)
        if not ready:
            return bytes(printed), "time"
        received = os.read(output, 1 << 16)
        if not received:
            return bytes(printed), ""
        printed += received
    return b"", "output"


def _become(
    program: str, assertion: str, stdin: int, output: int, verdict: int, expected: bytes, limits: dict[str, int]
) -> None:
    """Run the program and its assertion in the forked process, write `expected` on success, and exit."""
    code = 1
    try:
        nothing = os.open("/dev/null", os.O_RDWR)
        for source, target in ((stdin, 0), (output, 1), (nothing, 2), (verdict, 3)):
            os.dup2(source, target + 10)  # a source may have the number of another's target
        for target in range(4):
            os.dup2(target + 10, target)
        os.closerange(4, OPEN_FILES_MAX)
        for name, file in (("stdin", open(0, encoding="utf-8")), ("stdout", open(1, "w", encoding="utf-8"))):  # noqa: SIM115
            setattr(sys, name, file)
            setattr(sys, f"__{name}__", file)  # keeps it open when a program replaces sys.stdin or sys.stdout
        _limit(limits)
        _deny_processes()
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        with contextlib.suppress(SystemExit):
            _run(program, "completion.py", module)
        if assertion:
            _run(assertion, "test.py", module)
        _end_as_python_does()
        os.write(3, expected)
        code = 0
    except BaseException:  # noqa: BLE001  # a program may raise anything
        pass
    finally:
        os._exit(code)


def _run(program: str, name: str, module: types.ModuleType) -> None:
    exec(compile(program, name, "exec", dont_inherit=True), module.__dict__)


def _end_as_python_does() -> None:
    """Wait for threads, run atexit handlers and flush the output, which os._exit skips."""
    threading._shutdown()  # type: ignore[attr-defined]  # typeshed has only public names
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.__stdout__):
        if file is not None and not file.closed:
            file.flush()


def _limit(limits: dict[str, int]) -> None:
    for kind, limit in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_NPROC, limits["threads"]),
        (resource.RLIMIT_NOFILE, OPEN_FILES_MAX),
        (resource.RLIMIT_FSIZE, 0),  # applies to memfds as well
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def _deny_calls() -> None:
    """Have the kernel refuse DENIED with EPERM, in this process and its descendants."""
    architecture, clone, prlimit, denied = DENIED[platform.machine()]
    tests = [(JUMP_AT_LEAST, X32), *((JUMP_EQUAL, number) for number in denied)]
    _filter(
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, EPERM),
        (LOAD, 0, 0, NUMBER),
        (JUMP_EQUAL, 0, 1, CLONE3),
        (RETURN, 0, 0, ENOSYS),
        # Each jumps to the last rule, EPERM. The rules in between check arguments.
        *((jump, len(tests) - index + 6, 0, number) for index, (jump, number) in enumerate(tests)),
        (JUMP_EQUAL, 0, 2, clone),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (JUMP_BITS, 4, 3, NAMESPACES),
        (JUMP_EQUAL, 0, 2, prlimit),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (JUMP_EQUAL, 0, 1, 0),  # the process itself
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, EPERM),
    )


def _deny_processes() -> None:
    """Have the kernel refuse new processes but not threads, so that limits by process hold for the program."""
    _, clone, *_ = DENIED[platform.machine()]
    _filter(
        (LOAD, 0, 0, NUMBER),
        *((JUMP_EQUAL, len(FORKS) - index + 3, 0, number) for index, number in enumerate(FORKS)),
        (JUMP_EQUAL, 0, 2, clone),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (JUMP_BITS, 0, 1, CLONE_THREAD),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, EPERM),
    )


def _filter(*rules: tuple[int, int, int, int]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code))
    _must(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0))


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _must(code: int) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    main()
