"""What a look at the members costs, which the gateway takes several times a second."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.gateway.routing.members import Members
from policies.serving.member import Row
from policies.serving.wire import Announce, PolicyRef


def test_a_look_at_the_members_compares_none_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them would be half a million comparisons."""
    monkeypatch.setattr(Row, "__eq__", lambda *_: pytest.fail("two members are compared"))

    async def story() -> None:
        members = Members("secret")
        members.want(PolicyRef("0-1", "policies/0000/00000001"))
        label = members.wanted.label if members.wanted else ""
        for number in range(6):
            held = label if number % 2 else None
            await members.announce(f"rollout-{number}-i1", Announce(f"boot-{number}", f"h:{number}", held))
        assert [one.serving for one in members.status()] == [False, True] * 3
        await members.close()

    asyncio.run(story())
