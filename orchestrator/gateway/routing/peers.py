"""Where the nodes give each other what they download. It says nothing of who is a member."""

from __future__ import annotations

from policies.serving.wire import PEERS_SILENT_S


class PeerAddresses:
    """The addresses that nodes have told."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[str, float]] = {}  # by node: the address, and when

    def tell(self, node: str, address: str, now_s: float) -> list[str]:
        """A node says where it is. Returns where the others are."""
        begun_s = now_s - PEERS_SILENT_S
        self._told = {name: (told, at_s) for name, (told, at_s) in self._told.items() if at_s > begun_s}
        self._told[node] = address, now_s
        return [told for name, (told, _) in self._told.items() if name != node]
