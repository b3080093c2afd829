"""Draws a state machine as an SVG: a column of boxes, and an arc for each move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_BOX_WIDTH, _BOX_GAP = 110, 24
_PORT_GAP = 9  # between two ends of arcs on a box
_REACH, _REACH_PER_BOX = 34, 20  # of an arc's control points; an arc is 3/4 as wide


class Arc(NamedTuple):
    """A move between two boxes, by their places in the column. Moves down are drawn on the right."""

    old: int
    new: int

    @property
    def side(self) -> int:
        return 1 if self.old < self.new else -1

    @property
    def reach(self) -> int:
        return _REACH + _REACH_PER_BOX * abs(self.old - self.new)


def drawing(names: Sequence[str], moves: Sequence[tuple[str, str]]) -> str:
    """Return the SVG. A box that no move leaves has a thick frame."""
    arcs = [Arc(names.index(old), names.index(new)) for old, new in moves]
    ends = {(box, side): _ends(box, side, arcs) for box in range(len(names)) for side in (1, -1)}
    heights = [max(3, len(ends[box, 1]), len(ends[box, -1])) * _PORT_GAP for box in range(len(names))]
    tops = [4 + sum(heights[:box]) + box * _BOX_GAP for box in range(len(names))]
    left = 4 + max(arc.reach for arc in arcs) * 3 // 4
    colours = [f"hsl({360 * box // len(names)} 65% 45%)" for box in range(len(names))]

    def point(box: int, arc: Arc, end: str) -> tuple[int, float]:
        places = ends[box, arc.side]
        y = tops[box] + heights[box] * (places.index((arc, end)) + 1) / (len(places) + 1)
        return left + (_BOX_WIDTH if arc.side > 0 else 0), round(y, 1)

    shapes = [
        _arc(arc, f"{old} to {new}", point(arc.old, arc, "old"), point(arc.new, arc, "new"), colours[arc.old])
        for arc, (old, new) in zip(arcs, moves, strict=True)
    ]
    for box, name in enumerate(names):
        width = 1 if any(arc.old == box for arc in arcs) else 4
        place = f'x="{left}" y="{tops[box]}" width="{_BOX_WIDTH}" height="{heights[box]}" rx="5"'
        middle = f'x="{left + _BOX_WIDTH // 2}" y="{tops[box] + heights[box] / 2 + 5:g}" text-anchor="middle"'
        shapes.append(f'<rect {place} fill="#fff" stroke="{colours[box]}" stroke-width="{width}"/>')
        shapes.append(f'<text {middle} fill="#222">{name}</text>')
    size = f'width="{2 * left + _BOX_WIDTH}" height="{tops[-1] + heights[-1] + 4}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="14">'
    return "\n".join([head, *shapes, "</svg>"]) + "\n"


def _arc(arc: Arc, title: str, start: tuple[int, float], end: tuple[int, float], colour: str) -> str:
    (x, y), (x2, y2), out = start, end, arc.side * arc.reach
    tip = x2 + 7 * arc.side
    curve = f'<path d="M{x} {y}C{x + out} {y} {x2 + out} {y2} {tip} {y2}"/>'
    head = f'<path d="M{tip} {y2 - 3.5:.1f}L{x2} {y2}L{tip} {y2 + 3.5:.1f}z" fill="{colour}"/>'
    return f'<g stroke="{colour}" fill="none"><title>{title}</title>{curve}{head}</g>'


def _ends(box: int, side: int, arcs: Sequence[Arc]) -> list[tuple[Arc, str]]:
    """Return the ends of arcs on a side of a box, from top to bottom: arcs nest and do not cross there.

    Arcs to higher boxes come first, the shortest at the top, and then those to lower boxes, the longest first.
    """
    upper, lower = ("new", "old") if side > 0 else ("old", "new")
    here = [(arc, end) for arc in arcs for end in ("old", "new") if arc.side == side and getattr(arc, end) == box]
    above = sorted((item for item in here if item[1] == upper), key=lambda item: item[0].reach)
    below = sorted((item for item in here if item[1] == lower), key=lambda item: -item[0].reach)
    return [*above, *below]
