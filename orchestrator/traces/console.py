"""What trainers write on a terminal: rows amid other text, with colours, progress bars and names of processes.

Rows are objects of JSON, a line each or amid a line; dictionaries of Python, as a Trainer prints them, OpenRLHF
and slime after `step 5:`; and lines such as `step:5 - actor/kl_loss:0.1` (verl), `Step 5 | Loss: 0.1` (prime-rl),
`Epoch:[1/2](5/900), Reward: 0.1` (MiniMind) and, of loops of one's own, `step=5 reward=0.1`,
`[Step 5/900] reward=0.1` or `Step: 5/900, Reward: 0.1`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from orchestrator.traces.bars import Bar, number_rows
from orchestrator.traces.model import Row

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Ray's `(TaskRunner pid=7, ip=10.0.0.1) ` and torchrun's `[rank0]:`, `[default0]:`, before each line of a process.
_PROCESS = re.compile(r"^(?:\([^()\n]*\bpid=\d+[^()\n]*\)|\[(?:rank|default)?\d+\]:) ?", re.MULTILINE)
_BAR = r"(?:(?<=[\n\r\]}])|\A)[ ]*\d+%\|[^|\n\r]*\|[ ]*(?P<done>\d+)/(?P<total>\d+)[ ]\["
_EPOCH = r"\bepoch:\[(?P<epoch>\d+)/\d+\]\((?P<batch>\d+)/(?P<batches>\d+)\)"
_PAIRS = rf"(?:{_EPOCH}|\bstep(?:[: ]|: )(?P<at>\d+)(?:/\d+)?)(?P<between> [-|] |, )(?P<pairs>[^\n\r]+)"
_EQUAL = r"(?:(?<=[\n\r])|\A)(?P<equal>[^\n\r{}]*\b(?:\w+_)?step=\d[^\n\r{}]*)"
_IN_BRACKETS = r"\[step[ ](?P<in_brackets>\d+)(?:/\d+)?\][ ](?P<after>[^\n\r{}]*=[^\n\r{}]*)"
_BRACES = r"(?:\bstep[ :=]*(?P<before>\d+)(?:/\d+)?:?[ ]*)?(?P<braces>\{[^{}]*\})"
_PARTS = re.compile(f"{_BAR}|{_EQUAL}|{_IN_BRACKETS}|{_PAIRS}|{_BRACES}", re.IGNORECASE)
_EQUAL_PAIR = re.compile(r"([\w./-]+)=([^\s,;|=]+)")
# Patterns copy what they read, and a console's log may have hundreds of megabytes.
_PIECE_CHARACTERS = 1 << 23
_PAIR = re.compile(r"""['"]([^'"]+)['"]\s*:\s*(?:'([^']*)'|"([^"]*)"|([^,}]+))""")


def read_console(text: str) -> list[Row]:
    """The rows in the text; those without a step have that of the progress bar beside them."""
    plain = (_PROCESS.sub("", _COLOURS.sub("", piece)) for piece in pieces(text, _PIECE_CHARACTERS))
    return number_rows([part for piece in plain for part in _parts(piece)])


def pieces(text: str, characters: int) -> Iterator[str]:
    """The text in pieces of at least so many characters, cut at ends of lines, and not within a row's braces."""
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + characters) + 1 or len(text)
        while end < len(text) and text.rfind("{", begin, end) > text.rfind("}", begin, end):
            closed = text.find("}", end)
            end = text.find("\n", closed) + 1 or len(text) if closed >= 0 else len(text)
        yield text[begin:end]
        begin = end


def _parts(text: str) -> Iterator[Row | Bar]:
    """In their order. Only \\n and \\r end lines: other separators may stand in a completion."""
    begin = 0
    for line in re.finditer(r"^[ \t]*\{[^\n\r]*", text, re.MULTILINE):
        row = _json_object(line.group())
        if row is not None:
            yield from _parts_of_prose(text[begin : line.start()])
            yield row
            begin = line.end()
    yield from _parts_of_prose(text[begin:])


def _json_object(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # Python's notation, or a line that was cut off
        return None
    return row if isinstance(row, dict) else None


def _parts_of_prose(text: str) -> Iterator[Row | Bar]:
    for part in _PARTS.finditer(text):
        if part["done"]:
            yield Bar(_digits(part["done"]), _digits(part["total"]))
        elif part["equal"]:
            yield dict(_EQUAL_PAIR.findall(part["equal"]))
        elif part["after"]:
            yield {"step": part["in_brackets"], **dict(_EQUAL_PAIR.findall(part["after"]))}
        elif part["pairs"]:
            pairs = (pair.rpartition(":") for pair in part["pairs"].split(part["between"]))
            yield {
                "step": part["at"] or _step_over_epochs(part),
                **{name.strip(): value.strip() for name, _, value in pairs if name},
            }
        else:
            # A terminal breaks lines where they end, in names and numbers too.
            inside = part["braces"].replace("\n", "").replace("\r", "")
            row: dict[str, Any] = {name: a or b or c for name, a, b, c in _PAIR.findall(inside)}
            yield {"step": part["before"], **row} if part["before"] else row


def _step_over_epochs(part: re.Match[str]) -> int:
    """Of a batch that is counted anew in each epoch."""
    return (_digits(part["epoch"]) - 1) * _digits(part["batches"]) + _digits(part["batch"])


def _digits(text: str) -> int:
    return int(text[:18])
