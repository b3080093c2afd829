"""Spot weather from files: public formats, and what `grpo-orch weather export` writes.

- JSON with `metadata.gap_seconds` and `data`, one number for each gap, as SkyPilot's traces have it. Where `data`
  has only 0 and 1 it is one machine's, and 1 says that it is taken; else it says how many are to be had.
- CSV of `time,count`: seconds, and how many machines from then on. A first line of names is left out. With
  semicolons between them a comma is the decimal sign, as spreadsheets write it in much of Europe.
- JSON lines of what a run met (`recorded`).
"""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

from orchestrator.simulate.recorded import GAP_S, KINDS, minutes, replayed
from orchestrator.simulate.weather import ZONES, Weather, Zone

EXPECTED = (
    "expected JSON with metadata.gap_seconds and data, CSV of time,count, or `grpo-orch weather export`'s lines"
)


class NotWeather(Exception):
    """The file cannot be read as spot weather; the message names it, the place and what is expected."""


def read_weather(path: Path, nodes: int) -> Weather:
    """Return the weather in a file. Raises NotWeather.

    Args:
        path: the file.
        nodes: how many machines the run may want at most: what one machine's trace is multiplied by.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise NotWeather(f"{path}: {error}") from None
    if not text.strip():
        raise NotWeather(f"{path}: is empty; {EXPECTED}")
    try:
        if not text.lstrip().startswith("{"):
            return (_from_csv(text),)
        first = json.loads(text.lstrip().splitlines()[0]) if _is_lines(text) else json.loads(text)
        if first.get("what") in KINDS:
            return replayed([json.loads(line) for line in text.splitlines() if line.strip()], nodes)
        return (_from_gaps(first, nodes),)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, csv.Error) as error:
        raise NotWeather(f"{path}: {type(error).__name__}: {error}; {EXPECTED}") from None


def _is_lines(text: str) -> bool:
    """Whether its first line is a document of its own."""
    try:
        json.loads(text.lstrip().splitlines()[0])
    except ValueError:
        return False
    return True


def _from_gaps(document: dict[str, Any], nodes: int) -> Zone:
    gap_s, data = float(document["metadata"]["gap_seconds"]), [int(one) for one in document["data"]]
    if not 0 < gap_s < math.inf or not data or min(data) < 0:
        raise ValueError("gap_seconds above 0 and numbers of 0 or more are needed")
    if max(data) <= 1:
        data = [nodes * (1 - taken) for taken in data]
    return Zone(str(document["metadata"].get("zone", ZONES[0])), gap_s, tuple(data))


def _from_csv(text: str) -> Zone:
    lines = text.splitlines()
    if ";" in lines[0]:
        lines = [line.replace(",", ".").replace(";", ",") for line in lines]
    rows = [row for row in csv.reader(lines) if row]
    if not _is_number(rows[0][0]):
        rows = rows[1:]
    points = [(float(row[0]), int(float(row[1]))) for row in rows if len(row) > 1]
    if len(points) != len(rows) or not points:
        raise ValueError("each line needs a time and a count")
    times = [time_s for time_s, _ in points]
    if times != sorted(times) or min(count for _, count in points) < 0:
        raise ValueError("times must not go back, and counts not be below 0")
    gaps = minutes(times[-1] - times[0]) + 1
    counts, place = [], 0
    for gap in range(gaps):
        while place + 1 < len(points) and times[place + 1] <= times[0] + gap * GAP_S:
            place += 1
        counts.append(points[place][1])
    return Zone(ZONES[0], GAP_S, tuple(counts))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
