"""New weights for vLLM's engine, from within its server: reloaded whole, overwritten where they have changed, and
first of all both, to find out whether that comes to the same.

What is computed from parameters when they are loaded, as packed matrices of CPUs or what some attention folds into
one, does not follow parameters that are overwritten. Nothing tells which models have such; so for every boot of an
engine the first changes are tried: overwritten and reloaded, the engine must compute the same bits, and its
parameters must be the file's where the changes went.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from checkpoint.store import layout
from policies.serving.wire import LoadPolicy


async def reload(engine: Any, path: str) -> None:
    """Have it read all weights from the folder `path`."""
    await _paused(engine, "reload_all", (path,))


async def overwrite(engine: Any, wanted: LoadPolicy) -> None:
    """Have it overwrite what has changed. Raises what a worker raises: then its weights are those of no policy."""
    if why := await _follow(engine, wanted):
        raise ValueError(f"the loader of this model was followed before, and is not now: {why}")
    await _paused(engine, "apply_deltas", (wanted.deltas, wanted.digests))


async def both_ways(engine: Any, wanted: LoadPolicy, computed: Callable[[], Awaitable[list[float]]]) -> str:
    """Have it overwrite what has changed, then read all weights. Returns why the two are not the same.

    Args:
        computed: what the engine computes of a fixed text.
    """
    if why := await _follow(engine, wanted):
        await reload(engine, wanted.path)
        return f"vLLM's loader of this model cannot be followed: {why}"
    await _paused(engine, "apply_deltas", (wanted.deltas, wanted.digests))
    overwritten = await computed()
    await reload(engine, wanted.path)
    reloaded = await computed()
    if overwritten != reloaded:
        return "with weights that were overwritten it does not compute what it does with reloaded ones"
    if why := await _follow(engine, wanted):  # a reload may have moved parameters
        return f"vLLM's loader of this model cannot be followed: {why}"
    if name := await differs(engine, str(Path(wanted.path) / layout.MODEL), 0, 1):
        return f"after a reload {name} is not in the parameters as it is in the file"
    return ""


async def differs(engine: Any, path: str, first: int, step: int) -> str:
    """A tensor that the engine does not hold as the file at `path` does, of each `step`th from the `first`."""
    return max(map(str, await engine.collective_rpc("differs", args=(path, first, step))))


async def _follow(engine: Any, wanted: LoadPolicy) -> str:
    return max(map(str, await engine.collective_rpc("follow_loader", args=(wanted.deltas,))))


async def _paused(engine: Any, method: str, args: tuple[Any, ...]) -> None:
    # Nothing runs by now; should anything be left in the engine, it is aborted here and not continued. The caches
    # go too: what was computed from a prompt with the old weights is worthless. `engine.pause_generation` is the
    # same, with a pause of 20 ms for the comfort of callers.
    await engine.engine_core.pause_scheduler_async(mode="abort", clear_cache=True)
    await engine.collective_rpc(method, args=args)
    await engine.resume_generation()
