"""Real vLLM engines, started and loaded as rollout nodes do: weights that follow a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import aiohttp
from structlog.testing import capture_logs

from benchmarks.check_gpu.lab import LIMIT_S, Lab, installed, trained
from benchmarks.check_gpu.outcome import Failed, NotThere
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.spec import Dataset, RolloutSpec, RunSpec, TrainerSpec
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import PolicyRef
from grpo_orch.policies.weights.tensors import ServedTypes
from grpo_orch.tasks.machine.node_env import NodeEnv
from grpo_orch.tasks.rollout.policy_check import PolicyCheck
from grpo_orch.tasks.rollout.policy_folders import PolicyFolders
from grpo_orch.tasks.rollout.policy_loader import PolicyLoader
from grpo_orch.tasks.rollout.vllm import server as vllm_server
from grpo_orch.tasks.storing.publish import PolicyPublisher
from grpo_orch.tasks.storing.step_costs import StepCosts
from grpo_orch.tasks.trl.canary import canary_of

STEPS = 4
T = TypeVar("T")
FLAGS = {"dtype": "bfloat16", "kv-cache-memory-bytes": 64 * 2**20, "max-model-len": 256}
# It is to find this much of the GPU free, and takes the cache above and its weights.
ON_GPU = {"gpu-memory-utilization": 0.2}
ON_CPU = {"enforce-eager": True}
CPU_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


class Engine:
    """A boot of vLLM on a model's folder, and how a node brings policies into it."""

    def __init__(self, lab: Lab, model: Any, store: Store, number: int) -> None:
        folder = lab.folder / f"engine-{store.url.rpartition('/')[2]}-{number}"
        lab.saved(model, folder / "base")
        gpu = lab.visible(number, 1) if lab.gpus else CPU_ENV
        spec = RunSpec(
            name="check",
            storage=store.url,
            trainer=TrainerSpec(model="base", dataset=Dataset(path="json"), reward_funcs=()),
            grpo={},
            workdir=str(folder),
            rollout=RolloutSpec(
                vllm={**FLAGS, **(ON_GPU if lab.gpus else ON_CPU)}, env={**gpu, "HF_HUB_OFFLINE": "1"}
            ),
        )
        env = NodeEnv(store.url, f"rollout-{number}-i1", "the-run's-secret", 1, 0, str(folder), "127.0.0.1")
        self._loop = asyncio.new_event_loop()
        self._http = self.do(_session())
        try:
            self.server = self.do(vllm_server.start(spec, env, self._http))
        except BaseException:
            self.do(self._http.close())
            raise
        self._check = PolicyCheck(spec)
        self._loader = PolicyLoader(PolicyFolders(store, folder / "policies"))
        self._holds = ""

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def follow(self, ref: PolicyRef) -> bool:
        """Load a policy, by what has changed where that is of use; return whether it was by that alone. Raises
        PolicyRefused: it does not compute what its trainer does; ServerFailed."""

        async def story() -> bool:
            ready = await self._loader.fetch([self.server], ref, self._holds, lambda: True)
            canary = ready.canary if ready.folder is None else self._check.verify(ready.folder)
            await self._loader.load(self.server, ready, canary)
            await self._loader.loaded(ready, [self.server])
            # The file follows in the background, and what the engine holds is compared with it.
            await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
            return ready.folder is None

        alone = self.do(story())
        self._holds = ref.label
        return alone

    def stop(self) -> None:
        self.do(self.server.stop())
        self.do(self._http.close())
        self._loop.close()


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S))


class Trainer:
    """A model that is trained, and its publisher."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.model = lab.model()
        self.store = Store(f"file://{lab.folder}/{name}")
        scratch, served = lab.folder / f"{name}-scratch", ServedTypes("BF16", "F32")
        self._publisher = PolicyPublisher(self.store, self.model.config, scratch, (0, 1, 1), served, StepCosts())

    def publish(self, step: int) -> PolicyRef:
        canary = canary_of(self.model, "no")
        return self._publisher.publish(PolicyVersion(0, step), self.model.named_parameters(), canary)


@contextmanager
def _engine(lab: Lab, trainer: Trainer, number: int) -> Iterator[Engine]:
    engine = Engine(lab, trainer.model, trainer.store, number)
    try:
        yield engine
    finally:
        engine.stop()


def apply(lab: Lab) -> str:
    """Policies into an engine, which after each computes what the trainer does."""
    _needs_vllm()
    trainer = Trainer(lab, "apply")
    with _engine(lab, trainer, 0) as engine, capture_logs() as logs:
        alone = [engine.follow(trainer.publish(0))]
        for step in range(1, STEPS + 1):
            trained(trainer.model, rate=1e-4)
            alone.append(engine.follow(trainer.publish(step)))
    why = [one["reason"] for one in logs if one["event"] in ("delta_fallback_full_load", "engine_proof_failed")]
    if any(one["event"] == "engine_proof_failed" for one in logs):
        raise Failed(why[-1])
    how = f"{sum(alone)} by what had changed alone, the others whole"
    how += f" ({why[0].partition(':')[0]})" if why else ""
    return f"{STEPS + 1} policies, {how}; each passed its canary"


def _needs_vllm() -> None:
    if not installed("vllm"):
        raise NotThere("vllm is not installed")
