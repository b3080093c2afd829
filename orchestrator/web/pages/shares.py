"""How much of a lane's time its machines loaded or were idle, in cells: nothing of it is in the journal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.views.measured.activity_log import Recorded
from orchestrator.web.pages.window import Window
from policies.ledger.lives import Life
from policies.serving.activity import UNKNOWN, pack, unpack

CELLS = 400


@dataclass(frozen=True, slots=True)
class Cells:
    """How a window is divided: `count` cells of `cell_s` from `from_s` on, each of `each` slots."""

    from_s: float
    cell_s: float
    count: int
    first: int
    each: int


def cells_of(window: Window, slot_s: int) -> Cells:
    """As few slots a cell as make at most CELLS."""
    first, last = int(window.from_s // slot_s), int(window.until_s // slot_s)
    each = math.ceil((last - first + 1) / CELLS)
    return Cells(first * slot_s, each * slot_s, math.ceil((last - first + 1) / each), first, each)


def shares(lives: Sequence[Life], recorded: Recorded, cells: Cells) -> str:
    """Two hexadecimal digits a cell: fifteenths of its time spent loading, and idle; `ff` where nothing is known.
    Empty where nothing is known at all."""
    sums = [[0.0, 0.0, 0.0] for _ in range(cells.count)]
    for life in lives:
        # Of its own time alone: where it began or ended in a slot, the slot tells of that part.
        first = max(cells.first, int(life.from_s // recorded.slot_s))
        last = min(cells.first + cells.count * cells.each - 1, int(life.until_s // recorded.slot_s))
        for place, byte in enumerate(
            recorded.line(life.node, first, max(0, last - first + 1)), first - cells.first
        ):
            found = unpack(byte)
            if found is not None:
                cell = sums[place // cells.each]
                cell[0] += found.loading
                cell[1] += found.idle
                cell[2] += 1
    packed = bytes(pack(*cell) for cell in sums)
    return packed.hex() if any(byte != UNKNOWN for byte in packed) else ""
