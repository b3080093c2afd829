"""The gateway's members, for those who look after them: list, drain, remove, and what happened to them."""

from __future__ import annotations

import msgspec
from aiohttp import web

from orchestrator.gateway.routing.members import Members
from orchestrator.gateway.surface import admission
from orchestrator.gateway.surface.admission import Refused
from orchestrator.gateway.surface.describe import describe


class Admin:
    """The handlers."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def routes(self) -> list[web.RouteDef]:
        """The paths and their handlers."""
        return [
            web.get("/members", self._list),
            web.get("/events", self._events),
            web.delete("/members/{node}", self._remove),
            web.post("/members/{node}/drain", self._drain),
        ]

    async def _list(self, _: web.Request) -> web.Response:
        members, policy = self._members, self._members.wanted
        wanted = None if policy is None else policy.label
        return _json({"policy": wanted, "members": describe(members.status(), members.changes, wanted)})

    async def _events(self, _: web.Request) -> web.Response:
        return _json({"changes": self._members.changes})

    async def _drain(self, request: web.Request) -> web.Response:
        """A node that is no member is drained as soon as it comes."""
        self._members.drain(node_of(request))
        return web.Response(status=204)

    async def _remove(self, request: web.Request) -> web.Response:
        """With `?boot=ID` that boot leaves, as its own agent says; without it, whatever boot is there."""
        node, boot_id = node_of(request), request.query.get("boot")
        if boot_id is not None:
            self._members.leave(node, admission.name_of("boot", boot_id))
        elif not self._members.remove(node):
            raise Refused(404, f"{node} is no member")
        return web.Response(status=204)


def node_of(request: web.Request) -> str:
    """The node that the path names. Raises Refused."""
    return admission.name_of("node", request.match_info["node"])


def _json(document: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")
