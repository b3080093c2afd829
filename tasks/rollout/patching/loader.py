"""How a policy comes into a node's engine: overwritten where it has changed, or read whole from the file.

What the engine holds and what the file holds are two things. The engine goes ahead by staged changes; the file
follows in the background, and is brought level first where all is to be read: after a start of vLLM, a rollback
or a lost delta, and for the trial that a boot's first changes of each kind of tensor are put to.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from checkpoint.store.errors import StoreError
from checkpoint.weights import delta
from policies.serving.canary import Canary
from policies.serving.wire import PolicyRef
from tasks.rollout.policy_check import canary_in
from tasks.rollout.policy_folders import DiskFailed, Overtaken, PolicyFolders, Staged
from tasks.rollout.vllm_server import Server, ServerFailed

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
    """Brings policies into one engine after the other."""

    def __init__(self, folders: PolicyFolders) -> None:
        self._folders = folders
        self._refused = ""  # why changes are of no use on this node
        self._boot, self._tried = "", frozenset[str]()  # the kinds of tensors that this boot was tried with
        self._holds: PolicyRef | None = None  # the engine, where the file may be behind
        self._settling: asyncio.Task[None] | None = None
        self._hurried = False
        self._proofs = 0

    async def fetch(
        self, server: Server | None, wanted: PolicyRef, holds: str | None, still: Callable[[], bool]
    ) -> Ready:
        """Fetch and verify a policy, while the engine serves another.

        Args:
            server: if one is up.
            holds: the label of the policy that it holds.

        Raises what `PolicyFolders.fetch` does, PolicyRefused.
        """
        found = None
        if server is not None and holds and not server.adapters and not self._refused:
            found = await self._staged(wanted, holds, still)
            if found is not None and server.boot_id == self._boot and found.kinds <= self._tried:
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
        """Give it to the engine, which serves nobody meanwhile. Raises PolicyRefused, ServerFailed."""
        begun_s, label = time.monotonic(), ready.policy.label
        if ready.staged is None:
            assert ready.folder is not None
            await server.load(label, ready.folder, canary)
        elif ready.folder is None:
            await server.overwrite(label, ready.base, ready.staged, canary)
        else:
            await self._try(server, ready, ready.folder, ready.staged)
        log.info("weights_changed", policy=label, whole=ready.folder is not None, s=_since(begun_s))
        if ready.folder is not None:
            await asyncio.to_thread(self._folders.keep_only, ready.folder)
            return
        self._holds = ready.policy
        if self._settling is None or self._settling.done():
            self._hurried = False
            self._settling = asyncio.create_task(self._settle(server))

    async def _try(self, server: Server, ready: Ready, folder: Path, staged: Staged) -> None:
        self._refused = "a trial ended vLLM or left it with what it does not compute"  # unless it comes to its end
        self._refused = await server.try_changes(ready.policy.label, ready.base, staged, ready.canary, folder)
        if self._refused:
            log.warning("changes_are_reloaded_whole", why=self._refused)
            return
        self._tried = ready.kinds | (self._tried if server.boot_id == self._boot else frozenset())
        self._boot = server.boot_id

    async def _settle(self, server: Server) -> None:
        """Bring the file to what the engine holds, until it is there, and compare a part of the two each time."""
        settled = None
        while (policy := self._holds) != settled and policy is not None:
            begun_s = time.monotonic()
            try:
                folder = await asyncio.to_thread(self._folders.settle, policy, lambda: not self._hurried)
                log.info("file_settled", policy=policy.label, s=_since(begun_s))
                if await server.prove(policy.label, folder, self._proofs % PROOFS, PROOFS):
                    self._proofs += 1
            except Overtaken:
                return
            except (
                StoreError,
                DiskFailed,
                OSError,
            ) as error:  # the next whole load, or the next changes, try again
                log.warning("file_not_settled", policy=policy.label, why=str(error))
                return
            except ServerFailed as error:
                log.error("engine_not_proved", policy=policy.label, why=str(error))
                await server.stop()
                return
            settled = policy

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
