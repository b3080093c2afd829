"""Lines of a terminal: words made to fit so many cells, which is not so many characters.

What others wrote is made fit to be shown first; what is cut is cut between words, so that no number and no name
loses a part of itself.
"""

from __future__ import annotations

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.text import Text

from orchestrator.views.words import shown

LABEL = 11  # cells of the word before a line of facts, the blank after it included
MORE = " …"
_JOINT = " · "


def plain(words: str) -> str:
    """On one line, and nothing in it that moves the cursor."""
    return " ".join(shown(words).split())


def fit(words: str, width: int) -> str:
    """As many words as there is room for, and an ellipsis where that is not all."""
    return (wrap(words, width, 1) or [""])[0]


def wrap(words: str, width: int, most: int) -> list[str]:
    """At most so many lines of at most `width` cells; the last one tells by an ellipsis that there was more.

    A word that is wider than a line is broken, and nothing of it is left out where there are lines enough.
    """
    if width <= 0 or most <= 0:
        return []
    lines, line = list[str](), ""
    for word in plain(words).split():
        joined = f"{line} {word}" if line else word
        if cell_len(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        *whole, line = chop_cells(word, width)
        lines += whole
        if len(lines) > most:
            break
    if line:
        lines.append(line)
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], _ellipsis(lines[most - 1], width)]


def _ellipsis(line: str, width: int) -> str:
    while cell_len(line) + len(MORE) > width:
        head, _, _ = line.rpartition(" ")
        if not head:
            return set_cell_size(line, max(0, width - 1)).rstrip() + "…"
        line = head
    return line + MORE


def in_lines(parts: list[str], width: int, most: int) -> list[str]:
    """The parts in at most so many lines, each part whole, as many from the first on as there is room for."""
    lines = list[str]()
    for part in parts:
        if lines and cell_len(lines[-1] + _JOINT + part) <= width:
            lines[-1] += _JOINT + part
        elif len(lines) < most:
            lines.append(fit(part, width))
        else:
            break
    return lines


def joined(parts: list[str], width: int) -> str:
    """The same on one line."""
    return (in_lines(parts, width, 1) or [""])[0]


def left(words: str, width: int) -> str:
    """Filled with blanks; what is wider is as wide as it is."""
    return words + " " * (width - cell_len(words))


def right(words: str, width: int) -> str:
    return " " * (width - cell_len(words)) + words


def labelled(label: str, words: str, width: int, most: int = 1, style: str = "") -> list[Text]:
    """A fact on at most so many lines, its label before the first."""
    found = wrap(words, width - LABEL, most)
    return [
        Text(f"{left('' if place else label, LABEL)}{line}", style, no_wrap=True)
        for place, line in enumerate(found)
    ]


def cut(line: Text, width: int) -> Text:
    """A line that is no prose, within the screen's edge whatever it holds."""
    if line.cell_len > width:
        line.truncate(max(0, width))
    return line
