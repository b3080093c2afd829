"""Real trainers, `python -m grpo_orch.tasks.trainer.main`, with TRL's plain generation and a store in a folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.check_gpu.lab import LIMIT_S, REPOSITORY, TINY, Lab, installed
from benchmarks.check_gpu.outcome import Failed, NotThere
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.security.vouched import sign_run
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import manifest
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.checkpoint.stream.transfer import read_manifest
from grpo_orch.policies.model import node_contract
from grpo_orch.policies.model.spec import Dataset, Replicas, RolloutSpec, RunSpec, TrainerSpec
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.machine.launching import trainer_argv
from grpo_orch.tasks.machine.node_env import NodeEnv
from grpo_orch.tasks.machine.spooling import remove_spool

TOKEN, NODE = "the-run's-secret", "trainer-0-i1"
STEPS, SAVED, KILLED = 6, 2, 3
Weights = dict[str, torch.Tensor]


class Run:
    """A run without rollout nodes: its store, its uploader and the trainers that are started."""

    def __init__(self, lab: Lab, name: str, processes: int = 1) -> None:
        self.folder = lab.folder / name
        self.work = self.folder / "work"
        self.work.mkdir(parents=True)
        self.store = Store(f"file://{self.folder}/store")
        self._gpus = lab.visible(0, processes)
        self.spec = RunSpec(
            name=name,
            storage=self.store.url,
            workdir=str(TINY),
            grpo=_grpo(lab, processes),
            rollout=RolloutSpec(replicas=Replicas(min=0, max=0)),
            trainer=TrainerSpec(
                model=str(lab.tiny / "model"),
                dataset=Dataset(path=str(lab.tiny / "prompts.jsonl")),
                reward_funcs=("rewards.digit_share",),
                resources={"accelerators": f"GPU:{processes}"},
            ),
        )
        documents.create_run(self.store, RunRecord(documents.SCHEMA, name, time.time(), self.spec))
        sign_run(self.store, TOKEN)

    def trained(self, killed_at: int | None = None) -> Weights:
        """The weights at the end, in files as they are stored. Raises Failed.

        Args:
            killed_at: the step at which the first trainer is killed; a second one goes on.
        """
        uploader = self._start([sys.executable, "-m", "grpo_orch.tasks.machine.uploader"], 1)
        try:
            attempt = 1
            if killed_at is not None:
                self._kill_at(killed_at)
                attempt = 2
            trainer = self._start(trainer_argv(self._env(attempt), self.spec), attempt)
            code = _ended(trainer)
            if code != 0:
                raise Failed(f"trainer {attempt} of {self.spec.name} ended with exit code {code}")
            return self._newest()
        finally:
            uploader.kill()
            uploader.wait()
            remove_spool(self.work)

    def _kill_at(self, step: int) -> None:
        trainer = self._start(trainer_argv(self._env(1), self.spec), 1)
        until_s = time.monotonic() + LIMIT_S
        while (beat := documents.TRAINER.read(self.store)) is None or beat.step < step:
            if trainer.poll() is not None or time.monotonic() > until_s:
                trainer.kill()
                raise Failed(f"the trainer ended, with {trainer.wait()}, before step {step}")
            time.sleep(0.01)
        trainer.kill()
        trainer.wait()

    def _newest(self) -> Weights:
        newest = Catalog(self.store, "check").newest().find(PolicyVersion(0, STEPS))
        found = read_manifest(self.store, newest)
        manifest.materialize(self.store, found.root, found.files, self.folder / "last")
        weights: Weights = load_file(self.folder / "last" / layout.MODEL)
        return weights

    def _env(self, attempt: int) -> NodeEnv:
        return NodeEnv(self.store.url, NODE, TOKEN, attempt, 0, str(self.work), "127.0.0.1")

    def _start(self, argv: list[str], attempt: int) -> subprocess.Popen[bytes]:
        told = {
            node_contract.RUN_ENV: self.store.url,
            node_contract.NODE_ENV: NODE,
            node_contract.TOKEN_ENV: TOKEN,
            node_contract.ATTEMPT_ENV: str(attempt),
            node_contract.WORKDIR_ENV: str(self.work),
            "HF_HUB_OFFLINE": "1",
            **self._gpus,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        }
        return subprocess.Popen(argv, cwd=REPOSITORY, env={**os.environ, **told})


def killed(lab: Lab) -> str:
    """A trainer that is killed after a checkpoint, and its successor, end as one that was not disturbed."""
    _needs_trl()
    ours, calm = Run(lab, "killed").trained(KILLED), Run(lab, "calm").trained()
    what = f"killed at step {KILLED} of {STEPS}"
    if (apart := _apart(ours, calm)) == 0.0:
        return f"{what}, the same weights bit for bit"
    # The same run twice may come out otherwise: where sums are made in any order, by atomic additions.
    usual = _apart(Run(lab, "calm-again").trained(), calm)
    said = f"weights differ by up to {apart:.2g}, those of two undisturbed runs by {usual:.2g}"
    if apart > 10 * usual:
        raise Failed(f"{what}, {said}")
    return f"{what}, not bit for bit: {said}"


def several(lab: Lab) -> str:
    """Two processes train one model, each on a GPU of its own, to weights that can be loaded."""
    if lab.gpus == 1:
        raise NotThere("this machine has one GPU")
    _needs_trl()
    from transformers import AutoModelForCausalLM

    run = Run(lab, "several", processes=2)
    weights = run.trained()
    loaded = dict(AutoModelForCausalLM.from_pretrained(run.folder / "last").named_parameters())
    if unlike := [name for name, one in loaded.items() if not torch.equal(one, weights[name])]:
        raise Failed(f"{unlike[0]} is loaded otherwise than it is stored, and {len(unlike) - 1} more")
    return f"2 processes, {STEPS} steps; the checkpoint loads with `from_pretrained`"


def _needs_trl() -> None:
    for name in ("trl", "peft", "datasets", "accelerate"):
        if not installed(name):
            raise NotThere(f"{name} is not installed")


def _grpo(lab: Lab, processes: int) -> dict[str, Any]:
    return {
        "max_steps": STEPS,
        "save_steps": SAVED,
        "per_device_train_batch_size": 8 // processes,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "beta": 0.02,
        "bf16": bool(lab.gpus),
        "use_cpu": not lab.gpus,
        "gradient_checkpointing": False,
    }


def _ended(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(LIMIT_S)
    finally:
        process.kill()


def _apart(ours: Weights, theirs: Weights) -> float:
    if ours.keys() != theirs.keys():
        raise Failed(f"other tensors: {sorted(ours.keys() ^ theirs.keys())[0]}")
    return max(float((one.double() - theirs[name].double()).abs().max()) for name, one in ours.items())
