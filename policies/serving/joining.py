"""What a node does before it can be of use, and how long it may stay where it is.

Time alone does not tell a node that is slow from one that hangs: at 300 Mbit/s 70B parameters take an hour. What
tells is whether it gets on.
"""

from __future__ import annotations

from dataclasses import dataclass

# A download has got on with each such share of it. With 900 s for each, as by default, the slowest that is waited
# for takes five hours, and has 8 MB/s at 141 GB.
SHARE = 1 / 20
# vLLM does not say how far it has read. The disks that SkyPilot asks for by default give 218 MB/s on AWS; compiled
# kernels and a busy host take their part of it.
READ_BYTES_PER_S = 100e6
BASE_MODEL = "fetching the base model"
HUB = f"{BASE_MODEL} from the hub"  # from its start, also where the store gave most of it before it gave no more
POLICY = "fetching the policy"
CHECKPOINT = "fetching the checkpoint"
ENGINE = "starting vLLM"
ENGINE_ANEW = "starting vLLM without what others have compiled"  # with which it did not come up


@dataclass(frozen=True, slots=True)
class Stage:
    """What a node is at. For a download `done_bytes` of `total_bytes`, which is 0 while it is not known; for
    `ENGINE` and `ENGINE_ANEW` the total is what vLLM reads from the disk."""

    name: str
    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Coming:
    """A node that is no member yet, as the gateway tells the others."""

    node: str
    stage: Stage
    still_s: float  # since it last got on


def gets_on(mark: Stage, now: Stage) -> bool:
    """Whether a node has got on since it was at `mark`. Bytes that are fetched a second time do not count."""
    return mark.name != now.name or now.done_bytes - mark.done_bytes > SHARE * now.total_bytes


def limit_s(stage: Stage, boot_timeout_s: float) -> float:
    """How long a node may stay at one point of that stage: what its machine is given, and in which vLLM reads."""
    reads = stage.name in (ENGINE, ENGINE_ANEW)
    return boot_timeout_s + (stage.total_bytes / READ_BYTES_PER_S if reads else 0.0)


def max_join_s(boot_timeout_s: float) -> float:
    """What a node takes at most before its last stage, if it always gets on: it downloads the base model from the
    store and, when that fails at its end, from the hub, each as slowly as it may. Four limits are for the rest."""
    return (2 / SHARE + 4) * boot_timeout_s
