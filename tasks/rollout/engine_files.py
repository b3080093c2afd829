"""Prepare files that all engines of a rollout machine need: the base model and compile caches."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.serving.joining import ENGINE, ENGINE_UNCACHED, Stage, stage_limit_s
from grpo_orch.tasks.machine.node_env import NodeEnv
from grpo_orch.tasks.models.base import BaseModel, with_model
from grpo_orch.tasks.rollout.compile_caches import CompileCaches
from grpo_orch.tasks.rollout.policy_check import PolicyCheck
from grpo_orch.tasks.rollout.vllm import flags as vllm_flags

# Limits of vLLM's start, as a share of the time after which the controller replaces the machine. With a restored
# compile cache the limit is lower, since a new machine would restore the same cache and hang again. Otherwise it
# is higher, since the controller does not watch an engine while others of the machine serve.
RESTORED_CACHE_SHARE = 0.8
DEFAULT_SHARE = 2
COMPILED = ".cache/grpo-orch/compiled"  # below the home folder, like vLLM's own caches
SERVED_S = 60.0  # of serving before a cache is stored: the first steps also compile, and take precedence


class EngineFiles:
    """The files of one machine's engines.

    Attributes:
        spec: the run's spec, with this machine's folder of the model.
        check: compares policies with that model.
        stage: the machine's progress while no engine is up.
    """

    def __init__(self, env: NodeEnv, spec: RunSpec, store: Store) -> None:
        self.spec = self._run_spec = spec
        self.check = PolicyCheck(spec)
        self.stage = Stage(ENGINE)
        self._compiled = CompileCaches(store, spec, Path.home() / COMPILED, env.token)
        self._serving: set[str] = set()  # engines that work with the compile cache
        self._has_served = asyncio.Event()
        self._lock = asyncio.Lock()
        self._model: BaseModel | None = None
        if (source := vllm_flags.source(spec)) is not None:
            hub = {**os.environ, **spec.rollout.env}
            still_s = spec.policies.boot_timeout_s
            self._model = BaseModel(store, source, Path(env.workdir), hub, still_s, self._set_stage)

    async def prepare(self, *, may_be_bare: bool) -> tuple[RunSpec, bool]:
        """Fetch the files for the next start of vLLM. Returns its spec, and whether it starts without weights."""
        async with self._lock:
            if self._model is not None and (outline := await asyncio.to_thread(self._model.outline)) is not None:
                self._use_model(outline)
            bare = may_be_bare and await asyncio.to_thread(self.check.covers_engine)
            if self._model is not None and not bare:
                self._use_model(await asyncio.to_thread(self._model.whole))
            reads_bytes = 0 if bare else await asyncio.to_thread(vllm_flags.base_bytes, self.spec)
            # A new stage name restarts the controller's timeout.
            self.stage = Stage(ENGINE_UNCACHED if self._compiled.is_discarded else ENGINE, 0, reads_bytes)
            return await asyncio.to_thread(self._compiled.restore, self.spec), bare

    @property
    def start_limit_s(self) -> float:
        """Time limit of vLLM's start."""
        is_untested = self._compiled.is_restored and not self._serving
        share = RESTORED_CACHE_SHARE if is_untested else DEFAULT_SHARE
        return share * stage_limit_s(self.stage, self.spec.policies.boot_timeout_s)

    @property
    def compiled_s(self) -> float:
        """How long it took to restore the compile cache."""
        return self._compiled.restore_s

    async def store_compiled(self) -> None:
        """Store the compile cache SERVED_S after an engine has begun to serve. Runs until cancelled."""
        while True:
            await self._has_served.wait()
            self._has_served.clear()
            await asyncio.sleep(SERVED_S)
            if self._serving:
                await asyncio.to_thread(self._compiled.store)

    def mark_serving(self, engine: str) -> None:
        """Record that an engine works with the compile cache."""
        self._serving.add(engine)
        self._has_served.set()

    def mark_failed(self, engine: str) -> None:
        """Record that an engine failed. Discards a restored compile cache if no engine works with it."""
        self._serving.discard(engine)
        if not self._serving:
            self._compiled.discard()

    def close(self) -> None:
        """Stop running transfers."""
        if self._model is not None:
            self._model.close()

    def _use_model(self, folder: Path | None) -> None:
        spec = with_model(self._run_spec, folder)  # without a folder as in run.yaml: vLLM reports the problem
        if spec != self.spec:
            self.spec, self.check = spec, PolicyCheck(spec)

    def _set_stage(self, stage: Stage) -> None:
        self.stage = stage
