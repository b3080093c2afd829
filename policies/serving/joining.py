"""Stages of a starting node, and how long it may stay at one point.

Time alone does not distinguish a slow node from a hung one: at 300 Mbit/s, 70B parameters take an hour. Progress
does.
"""

from __future__ import annotations

from dataclasses import dataclass

# Each such share of a download counts as progress. With the default of 900 s for each, the slowest download that
# is tolerated takes five hours: 8 MB/s at 141 GB.
SHARE = 1 / 20
# vLLM does not report how much it has read. SkyPilot's default disks give 218 MB/s on AWS; compiling kernels and a
# busy host take part of it.
READ_BYTES_PER_S = 100e6
BASE_MODEL = "fetching the base model"
HUB = f"{BASE_MODEL} from the hub"  # from the beginning, even if the store delivered most of it before it failed
POLICY = "fetching the policy"
CHECKPOINT = "fetching the checkpoint"
ENGINE = "starting vLLM"
ENGINE_UNCACHED = "starting vLLM without the shared compile cache"  # with which it did not start


@dataclass(frozen=True, slots=True)
class Stage:
    """A node's current activity.

    For a download, `done_bytes` of `total_bytes`, which is 0 while unknown. For `ENGINE` and `ENGINE_UNCACHED` the
    total is what vLLM reads from the disk.
    """

    name: str
    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class JoiningNode:
    """A joining node, as the gateway reports it."""

    node: str
    stage: Stage
    stalled_s: float  # since its last progress


def makes_progress(mark: Stage, now: Stage) -> bool:
    """Whether a node has made progress since `mark`. Bytes that are fetched a second time do not count."""
    return mark.name != now.name or now.done_bytes - mark.done_bytes > SHARE * now.total_bytes


def stage_limit_s(stage: Stage, boot_timeout_s: float) -> float:
    """Return how long a node may stay at one point of a stage: the boot timeout, plus vLLM's time to read."""
    is_reading = stage.name in (ENGINE, ENGINE_UNCACHED)
    return boot_timeout_s + (stage.total_bytes / READ_BYTES_PER_S if is_reading else 0.0)


def max_join_s(boot_timeout_s: float) -> float:
    """Return the longest time until a node's last stage, if it always makes progress.

    It downloads the base model from the store and, if that fails at the end, from the hub, each at the slowest
    tolerated speed. Four limits are for the rest.
    """
    return (2 / SHARE + 4) * boot_timeout_s
