"""What vLLM needs on a rollout machine, brought once for all of its engines: the base model, compiled code."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from checkpoint.store.run_store import Store
from policies.model.spec import RunSpec
from policies.serving.joining import ENGINE, ENGINE_ANEW, Stage, limit_s
from tasks.machine.node_env import NodeEnv
from tasks.models.base import BaseModel, with_model
from tasks.rollout.compile_caches import CompileCaches
from tasks.rollout.policy_check import PolicyCheck
from tasks.rollout.vllm import flags as vllm_flags

# Of the time after which the controller replaces the machine. It would bring again what others have compiled, and
# hang in it again; and the controller does not look at an engine whose siblings serve.
HANGS_SHARE = 0.8
BESIDE_OTHERS_SHARE = 2
COMPILED = ".cache/grpo-orch/compiled"  # below the home folder, as vLLM's own caches are


class BaseHere:
    """The machine's own.

    Attributes:
        spec: the run's, with the model where it is on this machine.
        check: of policies, beside that model.
        stage: what the machine is at, while none of its engines is up.
    """

    def __init__(self, env: NodeEnv, spec: RunSpec, store: Store) -> None:
        self.spec = self._of_run = spec
        self.check = PolicyCheck(spec)
        self.stage = Stage(ENGINE)
        self._compiled = CompileCaches(store, spec, Path.home() / COMPILED, env.token)
        self._serving: set[str] = set()  # engines that work with what is compiled
        self._joined = asyncio.Event()
        self._lock = asyncio.Lock()
        self._model: BaseModel | None = None
        if (source := vllm_flags.source(spec)) is not None:
            hub = {**os.environ, **spec.rollout.env}
            still_s = spec.policies.boot_timeout_s
            self._model = BaseModel(store, source, Path(env.workdir), hub, still_s, self._say)

    async def prepare(self, *, may_be_bare: bool) -> tuple[RunSpec, bool]:
        """Have what the next vLLM needs on this machine. Returns the run as that one reads it, and whether it
        starts without weights, as it may."""
        async with self._lock:
            if self._model is not None and (outline := await asyncio.to_thread(self._model.outline)) is not None:
                self._has(outline)
            bare = may_be_bare and await asyncio.to_thread(self.check.covers_engine)
            if self._model is not None and not bare:
                self._has(await asyncio.to_thread(self._model.whole))
            reads_bytes = 0 if bare else await asyncio.to_thread(vllm_flags.base_bytes, self.spec)
            # Another name, so that this start has all of a machine's time.
            self.stage = Stage(ENGINE_ANEW if self._compiled.doubted else ENGINE, 0, reads_bytes)
            return await asyncio.to_thread(self._compiled.bring, self.spec), bare

    @property
    def start_limit_s(self) -> float:
        """How long vLLM may take to come up."""
        in_doubt = self._compiled.of_others and not self._serving  # what others have compiled is
        share = HANGS_SHARE if in_doubt else BESIDE_OTHERS_SHARE
        return share * limit_s(self.stage, self.spec.policies.boot_timeout_s)

    @property
    def compiled_s(self) -> float:
        """What it took to bring what others have compiled."""
        return self._compiled.took_s

    async def keep(self) -> None:
        """Store what is compiled here whenever an engine has served for a while."""
        await self._compiled.keep(self._joined)

    def serves(self, engine: str) -> None:
        """That engine works."""
        self._serving.add(engine)
        self._compiled.works()
        self._joined.set()

    def doubt(self, engine: str) -> None:
        """That one does not: if none does, nothing that others have compiled is used any more."""
        self._serving.discard(engine)
        if not self._serving:
            self._compiled.doubt()

    def close(self) -> None:
        """End what is under way."""
        if self._model is not None:
            self._model.close()

    def _has(self, folder: Path | None) -> None:
        spec = with_model(self._of_run, folder)  # without one, as run.yaml has it: vLLM says what is wrong
        if spec != self.spec:
            self.spec, self.check = spec, PolicyCheck(spec)

    def _say(self, stage: Stage) -> None:
        self.stage = stage
