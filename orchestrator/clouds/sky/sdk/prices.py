"""SkyPilot's lists of prices in our types. Imports no SkyPilot."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from orchestrator.clouds.sky.calls import Call
from orchestrator.clouds.sky.records import ListPrice, PriceList

FETCH_TIMEOUT_S = 60.0  # some ten MB a cloud


def price_list(read: Callable[[str], tuple[list[Any], str]], clouds: Iterable[str]) -> PriceList:
    """Return what these clouds' machines with GPUs cost, and which list could not be had.

    Args:
        read: returns the rows of a cloud's list, and the day on which it was fetched.
    """
    found: list[ListPrice] = []
    dates, missing = {}, {}
    for cloud in clouds:
        call = Call(lambda: "", lambda _, cloud=cloud: read(cloud), lambda _: None)  # type: ignore[misc]
        try:
            rows, dates[cloud] = call.result(FETCH_TIMEOUT_S)
            found += map(list_price_of, rows)
        except Exception as error:  # noqa: BLE001 whatever it is, there are no prices
            missing[cloud] = type(error).__name__
    return PriceList(tuple(found), dates, missing)


def day_fetched(file: Path, cloud: str) -> str:
    """The day on which SkyPilot fetched the file with a cloud's list."""
    # SkyPilot touches the file itself also when it could not fetch a newer one.
    mark = file.parents[1] / ".meta" / cloud / f"{file.name}.md5"
    fetched_s = (mark if mark.exists() else file).stat().st_mtime
    return time.strftime("%Y-%m-%d", time.gmtime(fetched_s))


def list_price_of(row: Any) -> ListPrice:
    """The price that a row of SkyPilot's catalog is (`sky.catalog.common.InstanceTypeInfo`)."""
    memory_gib = _number(row.device_memory)
    return ListPrice(
        cloud=str(row.cloud).lower(),
        region=str(row.region),
        instance_type=str(row.instance_type or ""),
        gpu=str(row.accelerator_name),
        gpus=float(row.accelerator_count),
        gpu_memory_mib=None if memory_gib is None else 1024 * memory_gib,
        on_demand_usd_per_h=_number(row.price),
        spot_usd_per_h=_number(row.spot_price),
    )


def _number(value: Any) -> float | None:
    """None for what a list leaves open."""
    return None if value is None or not math.isfinite(value) else float(value)
