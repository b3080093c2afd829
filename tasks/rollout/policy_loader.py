"""Load policies into a node's engines, by deltas or in full from the file of weights.

Engine and file may hold different policies: deltas are staged and applied to the engine first, and to the file in
the background. The file is brought up to date first if an engine must load it in full: after a start of vLLM, a
rollback or a lost delta, and to test the first deltas of each kind of tensor in a boot.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.weights import delta
from grpo_orch.policies.serving.canary import Canary
from grpo_orch.policies.serving.wire import PolicyRef
from grpo_orch.tasks.rollout.policy_check import canary_in
from grpo_orch.tasks.rollout.policy_folders import PolicyFolders, Staged, Superseded
from grpo_orch.tasks.rollout.vllm.server import Server, ServerFailed

log = structlog.get_logger()

PROOFS = 64  # each changing tensor is compared with the file once in this many steps


@dataclass(frozen=True, slots=True)
class Ready:
    """A policy to load: by deltas `staged` for the policy `base`, from `folder`, or both ways as a test."""

    policy: PolicyRef
    folder: Path | None
    base: str = ""
    staged: Staged | None = None
    kinds: frozenset[str] = frozenset()  # of the deltas' tensors
    canary: Canary | None = None  # of the staged policy


class PolicyLoader:
    """Loads policies into a machine's engines. Engines that hold the same policy are updated together."""

    def __init__(self, folders: PolicyFolders) -> None:
        self._folders = folders
        self._refused: dict[str, str] = {}  # by member: why deltas do not work
        self._tested: dict[str, tuple[str, frozenset[str]]] = {}  # by member: its boot, tested kinds of tensors
        self._held: PolicyRef | None = None  # by the engines; the file may hold an older policy
        self._holders: list[Server] = []
        self._settling: asyncio.Task[None] | None = None
        self._is_settling_cancelled = False
        self._proofs = 0

    def takes_deltas(self, server: Server | None) -> bool:
        """Return whether deltas may be applied to the server's policy."""
        return server is not None and not server.adapters and not self._refused.get(server.member)

    async def fetch(
        self, servers: Sequence[Server], wanted: PolicyRef, held: str | None, is_wanted: Callable[[], bool]
    ) -> Ready:
        """Fetch and verify a policy, while the engines serve another one.

        Args:
            servers: those to load it into that are up.
            held: the label of the policy that all of them hold.

        Raises PolicyRefused, and like `PolicyFolders.fetch`.
        """
        staged = None
        if servers and held and all(self.takes_deltas(server) for server in servers):
            staged = await self._stage(wanted, held, is_wanted)
            if staged is not None and all(staged.kinds <= self._tested_kinds(server) for server in servers):
                return staged
        await self._end_settling()
        folder = await asyncio.to_thread(self._folders.fetch, wanted, is_wanted)
        return Ready(wanted, folder) if staged is None else replace(staged, folder=folder)

    async def _stage(self, wanted: PolicyRef, holds: str, is_wanted: Callable[[], bool]) -> Ready | None:
        """Stage deltas. Returns None if there are none, or no canary to test them with."""
        staged = await asyncio.to_thread(self._folders.stage, wanted, holds.partition("@")[2], is_wanted)
        if staged is None or (canary := canary_in(staged.extras)) is None:
            return None
        return Ready(wanted, None, holds, staged, await asyncio.to_thread(_kinds_in, staged), canary)

    async def load(self, server: Server, ready: Ready, canary: Canary | None) -> None:
        """Load it into one engine, which serves no requests meanwhile. Raises PolicyRefused, ServerFailed."""
        begun_s, label = time.monotonic(), ready.policy.label
        if ready.staged is None:
            assert ready.folder is not None
            await server.load(label, ready.folder, canary)
        elif ready.folder is None or ready.kinds <= self._tested_kinds(server):
            await server.overwrite(label, ready.base, ready.staged, canary)
        else:
            await self._test_deltas(server, ready, ready.folder, ready.staged)
        log.info("weights_changed", policy=label, whole=ready.folder is not None, s=_since(begun_s))

    async def loaded(self, ready: Ready, servers: Sequence[Server]) -> None:
        """Finish a policy that these servers have loaded: delete older files, or update the file of weights.

        Raises OSError.
        """
        if ready.folder is not None:
            await asyncio.to_thread(self._folders.keep_only, ready.folder)
            return
        self._held, self._holders = ready.policy, list(servers)
        if self._settling is None or self._settling.done():
            self._is_settling_cancelled = False
            self._settling = asyncio.create_task(self._settle())

    async def settled(self) -> None:
        """Wait for the update of the file that `loaded` started, if there is one."""
        if self._settling is not None:
            await self._settling

    async def _test_deltas(self, server: Server, ready: Ready, folder: Path, staged: Staged) -> None:
        member = server.member
        # Replaced below, unless the test raises.
        self._refused[member] = "a test of deltas ended vLLM or left it with a wrong policy"
        why = await server.try_deltas(ready.policy.label, ready.base, staged, ready.canary, folder)
        self._refused[member] = why
        if why:
            log.warning("delta_fallback_full_load", engine=member, reason=why)
            return
        self._tested[member] = server.boot_id, ready.kinds | self._tested_kinds(server)

    def _tested_kinds(self, server: Server) -> frozenset[str]:
        boot_id, kinds = self._tested.get(server.member, ("", frozenset[str]()))
        return kinds if boot_id == server.boot_id else frozenset()

    async def _settle(self) -> None:
        """Update the file to the policy that the engines hold, and compare a part of the engines with it."""
        settled = None
        while (policy := self._held) != settled and policy is not None:
            begun_s = time.monotonic()
            try:
                folder = await asyncio.to_thread(
                    self._folders.settle, policy, lambda: not self._is_settling_cancelled
                )
                log.info("policy_file_updated", policy=policy.label, s=_since(begun_s))
                await self._prove(policy, folder)
            except Superseded:
                return
            except (StoreError, OSError) as error:  # the next full load or delta tries again
                log.warning("policy_file_update_failed", policy=policy.label, reason=str(error))
                return
            settled = policy

    async def _prove(self, policy: PolicyRef, folder: Path) -> None:
        """Compare a part of each engine that holds the policy with the file. Ends an engine that differs."""
        is_proved = False
        for server in self._holders:
            try:
                is_proved |= await server.prove(policy.label, folder, self._proofs % PROOFS, PROOFS)
            except ServerFailed as error:
                log.error("engine_proof_failed", engine=server.member, policy=policy.label, reason=str(error))
                await server.stop()
        self._proofs += is_proved

    async def _end_settling(self) -> None:
        """Stop the update of the file: a download at its next part, an overwrite at its end."""
        self._is_settling_cancelled, self._held = True, None
        await self.settled()


def _kinds_in(staged: Staged) -> frozenset[str]:
    """Return the names of changing tensors with `#` for the numbers of layers and experts."""
    names = (tensor.name for path in staged.deltas for tensor in delta.index_of(path).tensors)
    return frozenset(re.sub(r"\d+", "#", name) for name in names)


def _since(begun_s: float) -> float:
    return round(time.monotonic() - begun_s, 3)
