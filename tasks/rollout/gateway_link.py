"""Announce a node's engines to the gateway, drain them and remove them from its members."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store.codec import from_json
from grpo_orch.checkpoint.store.errors import Corrupt, StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import machine_of
from grpo_orch.policies.serving.joining import Stage
from grpo_orch.policies.serving.wire import HOLD_S, JOINING, Announce, AnnounceReply, PolicyRef
from grpo_orch.tasks.machine.node_env import NodeEnv

ANSWER_S = 5.0  # in addition to the time for which the gateway holds an announcement
LEAVE_S = 1.0


class GatewayUnreachable(Exception):
    """The gateway did not answer, or its answer was invalid; try again."""


class GatewayLink:
    """A machine's client of the gateway. It reads the gateway's address from the store, again after a failure."""

    def __init__(self, store: Store, env: NodeEnv, http: aiohttp.ClientSession) -> None:
        self._store = store
        self._machine = machine_of(env.node)
        self._headers = {"Authorization": f"Bearer {env.token}"}
        self._http = http
        self._url: str | None = None
        self._superseded: set[asyncio.Task[AnnounceReply]] = set()

    async def announce(self, member: str, announcement: Announce, changed: asyncio.Event) -> AnnounceReply | None:
        """Return the gateway's reply, or None if `changed` is set first. Raises GatewayUnreachable.

        A superseded announcement is not cancelled, since that would end the membership: the gateway answers it
        when the next one arrives.
        """
        request = asyncio.ensure_future(self._announce(member, announcement))
        change = asyncio.ensure_future(changed.wait())
        try:
            await asyncio.wait({request, change}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            request.cancel()
            raise
        finally:
            change.cancel()
        if request.done():
            return request.result()
        self._superseded.add(request)
        request.add_done_callback(self._forget)
        return None

    async def report_stage(self, stage: Stage) -> PolicyRef | None:
        """Report a joining machine's progress. Returns the wanted policy, if any. Raises GatewayUnreachable."""
        body = msgspec.json.encode(stage)
        path = f"{JOINING}/{self._machine}"
        return _reply(await self._request("POST", path, timeout_s=ANSWER_S, body=body)).policy

    async def drain(self, member: str) -> None:
        """Request the gateway to send no more requests. Raises GatewayUnreachable."""
        await self._request("POST", f"/members/{member}/drain", timeout_s=ANSWER_S)

    async def leave(self, member: str, boot_id: str) -> None:
        """Report the end of this boot. If that fails, the gateway detects it later."""
        try:
            await self._request("DELETE", f"/members/{member}?boot={boot_id}", timeout_s=LEAVE_S)
        except GatewayUnreachable:
            return

    async def _announce(self, member: str, announcement: Announce) -> AnnounceReply:
        body = msgspec.json.encode(announcement)
        path = f"/members/{member}"
        return _reply(await self._request("POST", path, timeout_s=HOLD_S + ANSWER_S, body=body))

    async def _request(self, method: str, path: str, *, timeout_s: float, body: bytes | None = None) -> bytes:
        url = self._url
        if url is None:
            try:
                url = self._url = await asyncio.to_thread(documents.gateway_url, self._store)
            except StoreError as error:
                raise GatewayUnreachable(str(error)) from error
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http.request(
                method, f"{url}{path}", data=body, headers=self._headers, timeout=timeout
            ) as answer:
                content = await answer.read()
                if answer.status >= 300:
                    raise GatewayUnreachable(f"{url} answered {answer.status} {content[:200]!r}")
                return content
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._url = None
            raise GatewayUnreachable(f"{url}: {str(error) or type(error).__name__}") from error

    def _forget(self, task: asyncio.Task[AnnounceReply]) -> None:
        self._superseded.discard(task)
        if not task.cancelled():
            task.exception()  # ignored: the next announcement has the same result


def _reply(answer: bytes) -> AnnounceReply:
    try:
        return from_json(answer, AnnounceReply, f"{answer[:80]!r}")
    except Corrupt as error:
        raise GatewayUnreachable(f"invalid reply of the gateway: {error}") from error
