"""Real vLLM engines, started and loaded as rollout nodes do: weights that follow a trainer, and hand-overs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import aiohttp
from structlog.testing import capture_logs

from benchmarks.check_gpu import handing_over
from benchmarks.check_gpu.handing_over import CUT, TOKENS
from benchmarks.check_gpu.lab import LIMIT_S, Lab, installed, trained
from benchmarks.check_gpu.outcome import Failed, NotThere
from checkpoint.store.run_store import Store
from policies.model.spec import Dataset, RolloutSpec, RunSpec, TrainerSpec
from policies.model.vocabulary import PolicyVersion
from policies.serving.dtypes import ServedTypes
from policies.serving.wire import COMPLETIONS, MODEL, PolicyRef
from tasks.machine.node_env import NodeEnv
from tasks.rollout import vllm_server
from tasks.rollout.patching.loader import PolicyLoader
from tasks.rollout.policy_check import PolicyCheck
from tasks.rollout.policy_folders import PolicyFolders
from tasks.storing.publish import PolicyPublisher
from tasks.storing.step_costs import StepCosts
from tasks.trl.canary import canary_of

STEPS = 4
T = TypeVar("T")
FLAGS = {"dtype": "bfloat16", "kv-cache-memory-bytes": 64 * 2**20, "max-model-len": 256}
# Two engines may share one GPU: each is to find this much of it free, and takes the cache above and its weights.
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
        self._token = env.token
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
            ready = await self._loader.fetch(self.server, ref, self._holds, lambda: True)
            canary = ready.canary if ready.folder is None else self._check.passed(ready.folder)
            await self._loader.load(self.server, ready, canary)
            # The file follows in the background, and what the engine holds is compared with it.
            await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
            return ready.folder is None

        alone = self.do(story())
        self._holds = ref.label
        return alone

    def complete(self, rows: list[list[int]], seeds: list[int], count: int) -> list[list[int]]:
        """So many tokens more after each row, all rows at once. Raises Failed."""
        return self.do(self._complete(rows, seeds, count))

    async def _complete(self, rows: list[list[int]], seeds: list[int], count: int) -> list[list[int]]:
        return list(await asyncio.gather(*(self._one(a, b, count) for a, b in zip(rows, seeds, strict=True))))

    async def _one(self, row: list[int], seed: int, count: int) -> list[int]:
        headers = {
            "Authorization": f"Bearer {self._token}",
            "X-Grpo-Boot": self.server.boot_id,
            "X-Grpo-Policy": self._holds,
        }
        asked = {"model": MODEL, "prompt": row, "seed": seed, "max_tokens": count, "ignore_eos": True}
        asked |= {"temperature": 1.0, "return_token_ids": True, "logprobs": 0}
        url = f"{self.server.url}{COMPLETIONS}"
        async with self._http.post(url, json=asked, headers=headers) as answer:
            said = await answer.text()
            if answer.status != 200:
                raise Failed(f"vLLM answers {answer.status}: {said[:200]}")
        tokens: list[int] = json.loads(said)["choices"][0]["token_ids"]
        return tokens

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
    why = [one["why"] for one in logs if one["event"] in ("changes_are_reloaded_whole", "engine_not_proved")]
    if any(one["event"] == "engine_not_proved" for one in logs):
        raise Failed(why[-1])
    how = f"{sum(alone)} by what had changed alone, the others whole"
    how += f" ({why[0].partition(':')[0]})" if why else ""
    return f"{STEPS + 1} policies, {how}; each passed its canary"


def hand_over(lab: Lab) -> str:
    """A batch on one engine, and the second half of each completion on another, by the same seeds."""
    _needs_vllm()
    trainer = Trainer(lab, "hand-over")
    with _engine(lab, trainer, 0) as first, _engine(lab, trainer, 1) as second:
        ref = trainer.publish(0)
        for engine in (first, second):
            engine.follow(ref)
        rows = handing_over.prompts()
        seeds = list(range(len(rows)))
        whole = first.complete(rows, seeds, TOKENS)
        begun = [row + one[:CUT] for row, one in zip(rows, whole, strict=True)]
        # Alone, as one of few that a lost node leaves to others.
        rest = [second.complete([row], [seed], TOKENS - CUT)[0] for row, seed in zip(begun, seeds, strict=True)]
        said = handing_over.judged(whole, rest)
    return f"{said}; {'on one device' if lab.gpus < 2 else 'on another GPU'}, sampled by seed and position"


def _needs_vllm() -> None:
    if not installed("vllm"):
        raise NotThere("vllm is not installed")
