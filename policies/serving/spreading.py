"""Which of the nodes that download the same thing gets which part of it from the store, for all of them.

Rendezvous hashing (Thaler and Ravishankar, 1996): whoever knows of the same nodes finds the same order without
asking, and when one goes only its own parts change hands.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def in_turn(part: str, nodes: Iterable[str]) -> list[str]:
    """The nodes in the order in which they are to have this part; the first one gets it for the others."""
    return sorted(nodes, key=lambda node: hashlib.blake2b(f"{part} {node}".encode(), digest_size=8).digest())
