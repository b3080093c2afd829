"""What a node's engine says of itself, read beside it: how much it takes, and where its work is.

vLLM's limits depend on its hardware and version (`max_num_seqs` is 1,024 on an H100, 256 on others, 128 a worker
on CPUs), and its room for keys and values is known only once it is up.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.serving.wire import EngineWord

# vLLM's gauges and counters, and what they are here. Each is there once for each engine: all are added up, but for
# the share of the room, of which the fullest engine decides.
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_USAGE, _PREEMPTIONS = "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"
NUMBER_END = 2.0**53  # of engines' counts
_TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine takes: requests at a time; tokens that it has room for, 0 if it does not say."""

    max_requests: int = 1
    kv_tokens: int = 0


def read_metrics(text: str) -> EngineWord | None:
    """Read vLLM's answer to GET /metrics; None for one without its numbers."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        if line.startswith("vllm:"):
            what, _, value = line.rpartition(" ")
            try:
                number = float(value)
            except ValueError:
                continue
            if 0.0 <= number < NUMBER_END:  # what is not in it, NaN among it, is no count and no share
                found.setdefault(what.partition("{")[0], []).append(number)
    if _RUNNING not in found:
        return None
    return EngineWord(
        running=int(sum(found[_RUNNING])),
        waiting=int(sum(found.get(_WAITING, []))),
        kv_usage=min(1.0, max(0.0, *found.get(_USAGE, []), 0.0)),
        preemptions=int(sum(found.get(_PREEMPTIONS, []))),
        tokens=int(sum(sum(found.get(name, [])) for name in _TOKENS)),
    )
