"""The journal as a diary: the newest first, a page at a time, by kind and by word."""

from __future__ import annotations

from typing import Any

from orchestrator.views.events import event_json
from orchestrator.web.page import Asked, Page
from orchestrator.web.watch import Look

ON_A_PAGE = 200
FAR = 10**9


def _data(look: Look, asked: Asked) -> dict[str, Any]:
    kind, word = asked.text("kind"), asked.text("word")
    first = asked.whole("first", 0, 0, FAR)
    found = [
        line
        for line in reversed(look.diary)
        if (not kind or line.type == kind) and word.casefold() in line.text.casefold()
    ]
    return {
        "lines": [event_json(line) for line in found[first : first + ON_A_PAGE]],
        "first": first,
        "total": len(found),
        "kinds": look.once("kinds", lambda: sorted({line.type for line in look.diary})),
        "kind": kind,
        "word": word,
        "on_a_page": ON_A_PAGE,
    }


PAGE = Page("/diary", _data, "diary.html", "Diary")
