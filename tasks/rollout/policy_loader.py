"""How a policy comes into a node's engine: overwritten where it has changed, or read whole from the file.

What the engine holds and what the file holds are two things. The engine goes ahead by staged changes; the file
follows in the background, and is brought level first where all is to be read: after a start of vLLM, a rollback
or a lost delta, and for the trial that a boot's first changes of each kind of tensor are put to.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from checkpoint.store.errors import StoreError
from checkpoint.weights import delta
from policies.serving.canary import Canary
from policies.serving.wire import PolicyRef
from tasks.rollout.policy_check import canary_in
from tasks.rollout.policy_folders import DiskFailed, Overtaken, PolicyFolders, Staged
from tasks.rollout.vllm.server import Server, ServerFailed

log = structlog.get_logger()

PROOFS = 64  # steps in which each tensor that changes is compared with the file once


@dataclass(frozen=True, slots=True)
class Ready:
    """A policy to load: by what is `staged` upon the policy `base`, from `folder`, or both ways for a trial."""

    policy: PolicyRef
    folder: Path | None
    base: str = ""
    staged: Staged | None = None
    kinds: frozenset[str] = frozenset()
    canary: Canary | None = None  # of what is staged


class PolicyLoader:
    """Brings policies into a machine's engines: those of them that hold the same one, at once."""

    def __init__(self, folders: PolicyFolders) -> None:
        self._folders = folders
        self._refused: dict[str, str] = {}  # by member: why changes are of no use there
        self._tried: dict[str, tuple[str, frozenset[str]]] = {}  # by member: its boot, the kinds of tensors tried
        self._holds: PolicyRef | None = None  # the engines, where the file may be behind
        self._holders: list[Server] = []
        self._settling: asyncio.Task[None] | None = None
        self._hurried = False
        self._proofs = 0

    def takes_changes(self, server: Server | None) -> bool:
        """Whether a policy may come into it by changes to the one that it holds."""
        return server is not None and not server.adapters and not self._refused.get(server.member)

    async def fetch(
        self, servers: Sequence[Server], wanted: PolicyRef, holds: str | None, still: Callable[[], bool]
    ) -> Ready:
        """Fetch and verify a policy, while the engines serve another.

        Args:
            servers: those that will be given it, if any is up.
            holds: the label of the policy that all of them hold.

        Raises what `PolicyFolders.fetch` does, PolicyRefused.
        """
        found = None
        if servers and holds and all(self.takes_changes(one) for one in servers):
            found = await self._staged(wanted, holds, still)
            if found is not None and all(found.kinds <= self._kinds_tried(one) for one in servers):
                return found
        await self._end_settling()
        folder = await asyncio.to_thread(self._folders.fetch, wanted, still)
        return Ready(wanted, folder) if found is None else replace(found, folder=folder)

    async def _staged(self, wanted: PolicyRef, holds: str, still: Callable[[], bool]) -> Ready | None:
        """None where it cannot come by changes, or has no canary to try them with."""
        staged = await asyncio.to_thread(self._folders.stage, wanted, holds.partition("@")[2], still)
        if staged is None or (canary := canary_in(staged.beside)) is None:
            return None
        return Ready(wanted, None, holds, staged, await asyncio.to_thread(_kinds_in, staged), canary)

    async def load(self, server: Server, ready: Ready, canary: Canary | None) -> None:
        """Give it to one engine, which serves nobody meanwhile. Raises PolicyRefused, ServerFailed."""
        begun_s, label = time.monotonic(), ready.policy.label
        if ready.staged is None:
            assert ready.folder is not None
            await server.load(label, ready.folder, canary)
        elif ready.folder is None or ready.kinds <= self._kinds_tried(server):
            await server.overwrite(label, ready.base, ready.staged, canary)
        else:
            await self._try(server, ready, ready.folder, ready.staged)
        log.info("weights_changed", policy=label, whole=ready.folder is not None, s=_since(begun_s))

    async def loaded(self, ready: Ready, servers: Sequence[Server]) -> None:
        """These have loaded it and no other is about to: forget what led to it, or have the file follow. Raises
        OSError."""
        if ready.folder is not None:
            await asyncio.to_thread(self._folders.keep_only, ready.folder)
            return
        self._holds, self._holders = ready.policy, list(servers)
        if self._settling is None or self._settling.done():
            self._hurried = False
            self._settling = asyncio.create_task(self._settle())

    async def _try(self, server: Server, ready: Ready, folder: Path, staged: Staged) -> None:
        member = server.member
        # Unless it comes to its end.
        self._refused[member] = "a trial ended vLLM or left it with what it does not compute"
        why = await server.try_changes(ready.policy.label, ready.base, staged, ready.canary, folder)
        self._refused[member] = why
        if why:
            log.warning("changes_are_reloaded_whole", engine=member, why=why)
            return
        self._tried[member] = server.boot_id, ready.kinds | self._kinds_tried(server)

    def _kinds_tried(self, server: Server) -> frozenset[str]:
        boot_id, kinds = self._tried.get(server.member, ("", frozenset[str]()))
        return kinds if boot_id == server.boot_id else frozenset()

    async def _settle(self) -> None:
        """Bring the file to what the engines hold, until it is there, and compare a part of the two each time."""
        settled = None
        while (policy := self._holds) != settled and policy is not None:
            begun_s = time.monotonic()
            try:
                folder = await asyncio.to_thread(self._folders.settle, policy, lambda: not self._hurried)
                log.info("file_settled", policy=policy.label, s=_since(begun_s))
                await self._prove(policy, folder)
            except Overtaken:
                return
            except (
                StoreError,
                DiskFailed,
                OSError,
            ) as error:  # the next whole load, or the next changes, try again
                log.warning("file_not_settled", policy=policy.label, why=str(error))
                return
            settled = policy

    async def _prove(self, policy: PolicyRef, folder: Path) -> None:
        """Compare a part of each engine that holds the policy with the file; one that differs is ended."""
        proved = False
        for server in self._holders:
            try:
                proved |= await server.prove(policy.label, folder, self._proofs % PROOFS, PROOFS)
            except ServerFailed as error:
                log.error("engine_not_proved", engine=server.member, policy=policy.label, why=str(error))
                await server.stop()
        self._proofs += proved

    async def _end_settling(self) -> None:
        """Return once the file is left alone: a download ends at its next piece, an overwrite at its end."""
        self._hurried, self._holds = True, None
        if self._settling is not None:
            await self._settling


def _kinds_in(staged: Staged) -> frozenset[str]:
    """The names of the tensors that change, without the numbers of layers and experts."""
    names = (one.name for path in staged.deltas for one in delta.index_of(path).tensors)
    return frozenset(re.sub(r"\d+", "#", name) for name in names)


def _since(begun_s: float) -> float:
    return round(time.monotonic() - begun_s, 3)
