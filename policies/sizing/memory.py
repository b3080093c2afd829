"""Memory by what it is for, at the moment when all of it together is the most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one GPU, or of one machine.

    Attributes:
        parts: bytes by what they are; none is 0.
        moment: when that is, in a few words.
    """

    parts: Mapping[str, int] = field(default_factory=dict)
    moment: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


def memory_of(parts: Mapping[str, int], moment: str = "") -> Memory:
    """The memory, without what is nothing."""
    return Memory({name: size_bytes for name, size_bytes in parts.items() if size_bytes}, moment)


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """What training takes.

    Attributes:
        gpu: of each GPU, at the highest of a step's moments.
        host: of the machine, of all its processes together.
    """

    gpu: Memory
    host: Memory


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """What a vLLM engine takes.

    Attributes:
        gpu: of each of its GPUs; what is left for the KV cache is in it.
        host: of the machine, of all its engines together.
        token_bytes: that one GPU's KV cache holds of a token.
        tokens: that the engine's KV cache holds; 0 where the model leaves no room.
        sequences: of the longest kind, that it holds at once; fewer than 1: vLLM refuses to start.
    """

    gpu: Memory
    host: Memory
    token_bytes: int
    tokens: int
    sequences: float
