"""Processes of a trainer's machine that are forked from one with their imports done, which saves most of a start.

They run what `python -m MODULE` runs, with an environment and a log of their own, and may be killed like it.
Hashes of text are the same in all of them, as they are not in processes that start by themselves.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing import connection, forkserver
from pathlib import Path
from unittest import mock

from grpo_orch.policies.model.node_contract import EVALUATOR, TRAINER

UPLOADER = "grpo_orch.tasks.machine.uploader"
FORKED = frozenset({TRAINER, EVALUATOR, UPLOADER})
# Besides these modules: what transformers, TRL and datasets import at the first use.
IMPORTED = (
    "grpo_orch.tasks.trainer.assemble",
    "grpo_orch.tasks.evaluating.assemble_evaluator",
    "grpo_orch.tasks.evaluating.evaluator",
    UPLOADER,
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.generation.utils",
    "peft.tuners.lora",
    "datasets.packaged_modules.json.json",
)
# What they read at import. Not of the moment, in which a test may have changed it.
ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(IMPORTED))


class Forked:
    """One of them, with what tests use of a `subprocess.Popen`. Several threads may ask for its end."""

    def __init__(self, module: str, env: Mapping[str, str], log: Path) -> None:
        with mock.patch.dict(os.environ, ENV, clear=True):
            forkserver.ensure_running()
        self._module, self._lock = module, threading.Lock()
        self._process = _context.Process(target=_run, args=(module, dict(env), log))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        with self._lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        connection.wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self._module, timeout or 0.0)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile, and its parent has waited for it
                self.send_signal(9)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _run(module: str, env: dict[str, str], log: Path) -> None:
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.environ.clear()
    os.environ.update(env)
    multiprocessing.set_start_method("fork", force=True)  # else workers would be children of the tests' server
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
