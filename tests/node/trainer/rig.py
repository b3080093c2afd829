"""A run for the trainer's tests: a tiny model, a store in a folder, a stand-in gateway, real trainer processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord, read_forks
from grpo_orch.checkpoint.records.metrics import read_metrics
from grpo_orch.checkpoint.security.vouched import sign_run
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import manifest
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.checkpoint.stream.manifest import Manifest
from grpo_orch.checkpoint.stream.transfer import read_manifest
from grpo_orch.policies.model.node_contract import TRAINER
from grpo_orch.policies.model.spec import (
    CheckpointsSpec,
    Dataset,
    KlPolicy,
    OnBadPrompt,
    OnBadReward,
    PoliciesSpec,
    Replicas,
    RolloutSpec,
    RunSpec,
    TrainerSpec,
)
from grpo_orch.policies.model.vocabulary import Evaluation, PolicyVersion
from grpo_orch.policies.tick.snapshot import Trainer
from grpo_orch.tasks.machine.launching import trainer_argv
from grpo_orch.tasks.machine.leaving import Leaving
from grpo_orch.tasks.machine.node_env import NodeEnv
from grpo_orch.tasks.machine.spooling import find_spool, remove_spool
from grpo_orch.tasks.storing.heartbeat import Heartbeat
from grpo_orch.tasks.storing.restoring import Restored
from grpo_orch.tasks.trainer.assemble import assemble
from tests.budget import HANG_S
from tests.node.trainer.forked import FORKED, UPLOADER, Forked
from tests.node.trainer.stand_in_gateway import TOKEN, StandInGateway
from tests.rigs import tiny_model

REPOSITORY = Path(__file__).parents[3]
Process = subprocess.Popen[bytes] | Forked
NODE = "trainer-0-i1"
PROMPTS = 6
STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")  # what a checkpoint of one process has beside weights
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}

# Two prompts a step, so three steps are an epoch.
GRPO: dict[str, Any] = {
    "max_steps": 8,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 6,
    "learning_rate": 0.003,
    "lr_scheduler_type": "cosine",
    "beta": 0.02,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "save_steps": 2,
}


def make_tiny(folder: Path) -> Path:
    """Put the example's model and prompts into `folder`, and a few of the prompts alone; returns the folder."""
    tiny_model.make_tiny(folder, Path(sys.executable))
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    (folder / "few.jsonl").write_text("\n".join(lines[:PROMPTS]) + "\n")
    return folder


def run_spec(
    storage: str,
    tiny: Path,
    *,
    grpo: dict[str, Any],
    peft: dict[str, Any] | None = None,
    evaluates: bool = False,
    model: str | None = None,
    checkpoints: CheckpointsSpec | None = None,
    kl: KlPolicy | None = None,
    reward: str | None = "rig_rewards.lower_share",
    witness: str | None = None,
    accelerate: dict[str, Any] | None = None,
    dataset: str | tuple[Dataset, ...] = "few.jsonl",
    on_bad_prompt: OnBadPrompt = "skip",
    replicas: int = 1,
    accelerators: str = "",
    boot_timeout_s: float = 900.0,
    on_bad_reward: OnBadReward = "fail",
    trainer: dict[str, Any] | None = None,
    cloud: Literal["local", "sky"] = "local",
    max_staleness: int = 0,
) -> RunSpec:
    """A spec over the tiny model, with `grpo` over GRPO. Without `kl` the guard only watches.

    With `accelerators` it trains in a process for each; `trainer` is what else its section says.
    """
    return RunSpec(
        name="test",
        storage=storage,
        cloud=cloud,
        workdir=str(Path(__file__).parent),
        grpo={**GRPO, **grpo},
        rollout=RolloutSpec(
            replicas=Replicas(min=replicas, max=replicas),
            vllm={"dtype": "float32"},
            deadline_s=HANG_S,
            max_staleness=max_staleness,
        ),
        checkpoints=checkpoints or CheckpointsSpec(),
        policies=PoliciesSpec(
            kl=kl or KlPolicy(action="alert"),
            on_bad_prompt=on_bad_prompt,
            boot_timeout_s=boot_timeout_s,
            on_bad_reward=on_bad_reward,
        ),
        trainer=TrainerSpec(
            model=model or str(tiny / "model"),
            dataset=Dataset(path=str(tiny / dataset))
            if isinstance(dataset, str)
            else tuple(replace(one, path=str(tiny / one.path)) for one in dataset),
            eval_dataset=Dataset(path=str(tiny / "held_out.jsonl")) if evaluates else None,
            reward_funcs=tuple(one for one in (reward, witness) if one is not None),
            peft=peft,
            accelerate=accelerate,
            resources={"accelerators": accelerators} if accelerators else {},
            **(trainer or {}),
        ),
    )


class Rig:
    """One run and its stand-in gateway; `ready`: its specification, but for the store."""

    def __init__(
        self,
        folder: Path,
        tiny: Path,
        *,
        ready: RunSpec | None = None,
        evaluation: Evaluation | None = None,
        **spec: Any,
    ) -> None:
        torch.set_num_threads(1)  # several wait for each other longer than so little takes
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        self.store = Store(f"file://{folder}/store")
        made = run_spec(self.store.url, tiny, **spec) if ready is None else ready
        self.spec = replace(made, storage=self.store.url)
        documents.create_run(self.store, RunRecord(documents.SCHEMA, "id", time.time(), self.spec, evaluation))
        sign_run(self.store, TOKEN)
        self.gateway = StandInGateway(self.store, folder / "scratch")
        self.started: list[Process] = []

    def env(self, attempt: int = 1, timeline: int = 0) -> NodeEnv:
        return NodeEnv(self.store.url, NODE, TOKEN, attempt, timeline, str(self.work), "127.0.0.1")

    def heartbeat(self, attempt: int = 1, timeline: int = 0) -> Heartbeat:
        return Heartbeat(self.store, Trainer(NODE, attempt, timeline, 0, 0, "starting", 0.0))

    def assemble(self, attempt: int = 1, timeline: int = 0, restored: Restored | None = None) -> Any:
        """The trainer of the run, in this process."""
        beat, leaving, forks = (
            self.heartbeat(attempt, timeline),
            Leaving(self.work, attempt),
            read_forks(self.store),
        )
        run = documents.read_run(self.store)
        return assemble(self.env(attempt, timeline), run, self.store, beat, leaving, restored, forks)[0]

    def train(
        self, *callbacks: Any, attempt: int = 1, timeline: int = 0, start: PolicyVersion | None = None
    ) -> Any:
        """Train in this process, from a checkpoint where one is named; returns the trainer."""
        restored = folder = None
        if start is not None:
            folder = self.folder / f"on-{timeline}-from-{start}" / f"checkpoint-{start.step}"
            self.restore(start, folder)
            restored = Restored(start, folder, None)
        trainer = self.assemble(attempt, timeline, restored)
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=folder and str(folder))
        self.stored()
        return trainer

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Look again and again; the time limit is a failure with the end of the trainer's log."""
        end_s = time.monotonic() + HANG_S
        while not holds():
            assert time.monotonic() < end_s, f"not {what} in time\n{self.log().read_text()[-4000:]}"
            time.sleep(0.005)

    def start_trainer(
        self, attempt: int = 1, timeline: int = 0, argv: list[str] | None = None, *, forked: bool = True
    ) -> Process:
        """`python -m grpo_orch.tasks.trainer.main`, or another command line, its output in trainer-ATTEMPT.log."""
        argv = argv or [sys.executable, "-m", TRAINER]
        return self._start(argv, attempt, self.log(attempt), timeline, forked=forked)

    def start_ranks(self, attempt: int = 1, module: str = TRAINER) -> Process:
        """The trainer in as many processes as its specification says, by the machine's own launcher.

        `module` may stand in its place.
        """
        *launcher, _ = trainer_argv(self.env(attempt), self.spec)
        return self.start_trainer(attempt, argv=[*launcher, module])

    def start_uploader(self) -> None:
        """`python -m grpo_orch.tasks.machine.uploader`, its output in uploader.log."""
        self.uploader = self._start([sys.executable, "-m", UPLOADER], 1, self.folder / "uploader.log")

    def no_nodes_from(self, step: int) -> None:
        """No node is there for the policy of that step and later ones: however late who waits for it, the trainer
        takes no further one."""

        def look(version: str) -> None:
            self.gateway.members = int(PolicyVersion.parse(version).step < step)

        self.gateway.on_asked = look

    def stored(self) -> list[PolicyVersion]:
        """The checkpoints in the store, once nothing that a trainer sealed is on its way there."""
        spool, until = find_spool(self.work), time.monotonic() + HANG_S
        while spool is not None and spool.sealed():
            assert time.monotonic() < until, (self.folder / "uploader.log").read_text()[-4000:]
            time.sleep(0.01)
        return [one.at for one in Catalog(self.store, "test").newest().checkpoints]

    def digests(self, *names: str) -> dict[str, str]:
        """Of these files of the newest checkpoint, and of all its weights."""
        self.stored()
        found = read_manifest(self.store, Catalog(self.store, "test").newest().checkpoints[-1])
        digests = {file.name: file.digest for file in found.files}
        weights = [name for name in digests if name.endswith(".safetensors")]
        assert weights
        return {name: digests[name] for name in (*weights, *names)}

    def rows(self, timeline: int | None = None) -> dict[int, dict[str, float]]:
        """What was logged of each step."""
        return {row.step: row.values for row in read_metrics(self.store, timeline)}

    def trained(self) -> list[dict[str, float]]:
        """What was logged of the steps that generated."""
        return [values for values in self.rows().values() if "reward" in values]

    def results(self) -> list[tuple[int, float | None, float]]:
        """What each step earned and lost; a step that generated nothing has no reward."""
        return [(step, values.get("reward"), values["loss"]) for step, values in self.rows().items()]

    def restore(self, at: PolicyVersion, folder: Path) -> Manifest:
        """Fetch a checkpoint into a folder."""
        found = read_manifest(self.store, Catalog(self.store, "test").newest().find(at))
        manifest.materialize(self.store, found.root, found.files, folder)
        return found

    def _start(
        self, argv: list[str], attempt: int, log: Path, timeline: int = 0, *, forked: bool = True
    ) -> Process:
        env = {
            **os.environ,
            "GRPO_ORCH_RUN": self.store.url,
            "GRPO_ORCH_NODE": NODE,
            "GRPO_ORCH_TOKEN": TOKEN,
            "GRPO_ORCH_ATTEMPT": str(attempt),
            "GRPO_ORCH_TIMELINE": str(timeline),
            "GRPO_ORCH_WORKDIR": str(self.work),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            # As on a machine that we have set up: DeepSpeed finds its compiler's driver there.
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        interpreter, *_, module = argv
        if forked and [interpreter, "-m", module] == argv and module in FORKED:
            self.started.append(Forked(module, env, log))
        else:
            with log.open("ab") as out:
                told: Any = {"cwd": REPOSITORY, "env": env, "stdout": out, "stderr": subprocess.STDOUT}
                self.started.append(subprocess.Popen(argv, **told))
        return self.started[-1]

    def log(self, attempt: int = 1) -> Path:
        return self.folder / f"trainer-{attempt}.log"

    def last_line(self, attempt: int = 1) -> str:
        return self.log(attempt).read_text().splitlines()[-1]

    def wait(self, trainer: Process, attempt: int = 1, timeout_s: float = HANG_S) -> int:
        """The trainer's exit code; shows its output when it was not 0."""
        try:
            code = trainer.wait(timeout_s)
        finally:
            trainer.kill()
        if code != 0:
            print(self.log(attempt).read_text()[-4000:])
        return code

    def published(self) -> list[PolicyVersion]:
        """The policies in the store whose upload is whole."""
        keys = [entry.key for entry in self.store.entries(layout.POLICIES)]
        return sorted(layout.version_of(key) for key in keys if key.endswith(f"/{layout.MANIFEST}"))

    def beat(self) -> Trainer | None:
        return documents.TRAINER.read(self.store)

    def last_beat(self) -> Trainer:
        """Its newest heartbeat, where there must be one."""
        found = self.beat()
        assert found is not None
        return found


@contextmanager
def open_rig(folder: Path, tiny: Path, **spec: Any) -> Iterator[Rig]:
    rig = Rig(folder, tiny, **spec)
    rig.gateway.open()
    rig.start_uploader()
    try:
        yield rig
    finally:
        for process in rig.started:
            process.kill()
            process.wait()
        remove_spool(rig.work)
        rig.gateway.close()
