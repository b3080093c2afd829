"""The agent's side of the membership: announcements, drains and departures, wherever the gateway is by now."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass

import aiohttp
import msgspec

from checkpoint.records import documents
from checkpoint.store.codec import from_json
from checkpoint.store.errors import Corrupt, StoreError
from checkpoint.store.run_store import Store
from policies.model.vocabulary import machine_of
from policies.serving.joining import Stage
from policies.serving.wire import COMERS, HOLD_S, Announce, AnnounceReply, PolicyRef
from tasks.machine.node_env import NodeEnv

ANSWER_S = 5.0  # beyond the time for which the gateway holds an announcement
LEAVE_S = 1.0


class GatewayUnreachable(Exception):
    """It did not answer, or not as a gateway does: try again."""


@dataclass(slots=True)
class _Where:
    url: str | None = None  # of the gateway


class GatewayLink:
    """A machine's conversation with the gateway, whose address is in the store and is read again when it fails."""

    def __init__(self, store: Store, env: NodeEnv, http: aiohttp.ClientSession) -> None:
        self._store = store
        self._node = env.node
        self._headers = {"Authorization": f"Bearer {env.token}"}
        self._http = http
        self._where = _Where()
        self._overtaken: set[asyncio.Task[AnnounceReply]] = set()

    def of(self, member: str) -> GatewayLink:
        """The conversation of one engine, by its name. All of a machine's go with the same gateway."""
        other = copy.copy(self)
        other._node, other._overtaken = member, set()
        return other

    async def announce(self, said: Announce, changed: asyncio.Event) -> AnnounceReply | None:
        """Return the gateway's reply, or None when `changed` was set before it came. Raises GatewayUnreachable.

        An announcement that was overtaken is not cut off, which would end the membership: the gateway answers it
        when the next one comes.
        """
        asking = asyncio.ensure_future(self._announce(said))
        change = asyncio.ensure_future(changed.wait())
        try:
            await asyncio.wait({asking, change}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            asking.cancel()
            raise
        finally:
            change.cancel()
        if asking.done():
            return asking.result()
        self._overtaken.add(asking)
        asking.add_done_callback(self._forget)
        return None

    async def ask_wanted(self, stage: Stage) -> PolicyRef | None:
        """Say what this machine is at, and return what members are to hold, before this is one; None while nothing
        is wanted. Raises GatewayUnreachable."""
        body = msgspec.json.encode(stage)
        return _reply(
            await self._ask("POST", f"{COMERS}/{machine_of(self._node)}", timeout_s=ANSWER_S, body=body)
        ).policy

    async def drain(self) -> None:
        """Ask the gateway for no more work. Raises GatewayUnreachable."""
        await self._ask("POST", f"/members/{self._node}/drain", timeout_s=ANSWER_S)

    async def leave(self, boot_id: str) -> None:
        """Say that this boot is over; a gateway that does not hear it finds out by itself."""
        try:
            await self._ask("DELETE", f"/members/{self._node}?boot={boot_id}", timeout_s=LEAVE_S)
        except GatewayUnreachable:
            return

    async def _announce(self, said: Announce) -> AnnounceReply:
        body = msgspec.json.encode(said)
        return _reply(await self._ask("POST", f"/members/{self._node}", timeout_s=HOLD_S + ANSWER_S, body=body))

    async def _ask(self, method: str, path: str, *, timeout_s: float, body: bytes | None = None) -> bytes:
        url = self._where.url
        if url is None:
            url = self._where.url = await asyncio.to_thread(self._look_up)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http.request(
                method, f"{url}{path}", data=body, headers=self._headers, timeout=timeout
            ) as answer:
                said = await answer.read()
                if answer.status >= 300:
                    raise GatewayUnreachable(f"{url} answered {answer.status} {said[:200]!r}")
                return said
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._where.url = None
            raise GatewayUnreachable(f"{url}: {str(error) or type(error).__name__}") from error

    def _look_up(self) -> str:
        try:
            address = documents.read_gateway(self._store)
        except StoreError as error:
            raise GatewayUnreachable(str(error)) from error
        if address is None:
            raise GatewayUnreachable("the store names no gateway yet")
        return address.url

    def _forget(self, task: asyncio.Task[AnnounceReply]) -> None:
        self._overtaken.discard(task)
        if not task.cancelled():
            task.exception()  # of no interest: the announcement that overtook it meets the same


def _reply(answer: bytes) -> AnnounceReply:
    try:
        return from_json(answer, AnnounceReply, f"{answer[:80]!r}")
    except Corrupt as error:
        raise GatewayUnreachable(f"it answered {error}") from error
