"""Tokens a second of each machine, from its engines' counts in the gateway's status."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from policies.model.vocabulary import machine_of
from policies.serving.gateway_status import GatewayStatus


class Rates:
    """Compares each status with the one before it. An engine that began anew is counted from there."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, int]] = {}  # by member: when its engine had counted how many tokens
        self.by_machine: Mapping[str, float] = {}

    def see(self, gateway: GatewayStatus | None) -> None:
        """The gateway's newest status; None when it is not heard from."""
        members = [] if gateway is None else gateway.members
        counts = {one.node: (gateway.up_s, one.engine.tokens) for one in members if one.engine and gateway}
        rates = defaultdict[str, float](float)
        moved = False
        for node, (at_s, tokens) in counts.items():
            before_s, before = self._counts.get(node, (at_s, tokens))
            moved |= at_s != before_s
            if at_s > before_s and tokens >= before:
                rates[machine_of(node)] += (tokens - before) / (at_s - before_s)
        if moved or not counts:
            self.by_machine = dict(rates)
        self._counts = counts
