"""What the model says in a step: groups side by side, by words, reward, node and version, the worst and the best.

Drawn once: a text that somebody reads does not change under their eyes.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from orchestrator.samples import (
    Found,
    Link,
    NoSamples,
    Order,
    Wanted,
    choose,
    completion_plain,
    find_step,
    groups_of,
    messages_plain,
    stored_steps,
    summary_plain,
    why_none,
)
from orchestrator.web.page import Asked, Page, Refused
from orchestrator.web.watch import Look

ON_A_PAGE = 32  # completions
FAR = 10**9
_ONLY = {"": (None, None), "cut": (True, None), "whole": (False, None), "handed_over": (None, True)}


def _samples(look: Look, asked: Asked) -> dict[str, Any]:
    order = Order(asked.choice("order", tuple(Order)))
    only = asked.choice("only", tuple(_ONLY))
    first = asked.whole("first", 0, 0, FAR)
    words = {name: asked.text(name) for name in ("step", "search", "low", "high", "node", "policy")}
    wanted = Wanted(
        search=words["search"],
        reward_min=_number(asked, "low"),
        reward_max=_number(asked, "high"),
        node=words["node"],
        policy=words["policy"],
        cut=_ONLY[only][0],
        handed_over=_ONLY[only][1],
    )
    asked_for = {**words, "order": str(order), "only": only}
    steps = stored_steps(look.store)
    if not steps:
        return {"why_none": why_none(look.store), "asked_for": asked_for, "groups": []}
    try:
        step = find_step(steps, words["step"])
    except NoSamples as error:
        raise Refused(404, str(error)) from None
    chosen, told = choose(step, groups_of(look.store, step), wanted, order, ON_A_PAGE, first)
    place = steps.index(step)
    return {
        **summary_plain(step, told),
        "why_none": "",
        "before": str(steps[place - 1]) if place else None,
        "after": str(steps[place + 1]) if place + 1 < len(steps) else None,
        "steps": len(steps),
        "first": first,
        "on_a_page": ON_A_PAGE,
        "asked_for": {**asked_for, "step": str(step)},
        "groups": [
            {
                "group": number,
                "prompt": messages_plain(rows[0].group.prompt),
                "completions": [completion_plain(one) for one in rows],
            }
            for number, found in groupby(chosen, key=lambda one: one.link.group)
            for rows in [list(found)]
        ],
    }


def _number(asked: Asked, name: str) -> float | None:
    return asked.number(name, 0.0, -1e9, 1e9) if asked.text(name) else None


SAMPLES = Page("/samples", _samples, "samples.html", "Samples")


# One completion, whole, under a name that lasts as long as its step's samples are kept.


def _sample(look: Look, asked: Asked) -> dict[str, Any]:
    try:
        link = Link.parse("/".join(asked.text(name) for name in ("step", "group", "index")))
        step = find_step(stored_steps(look.store), link.step)
    except NoSamples as error:
        raise Refused(404, str(error)) from None
    for number, head, group in groups_of(look.store, step):
        if number == link.group and link.index < len(group.samples):
            one = Found(link, head, group, group.samples[link.index])
            return {
                "step": str(step),
                "prompt": messages_plain(group.prompt),
                "completion": completion_plain(one),
                "beside": len(group.samples),
            }
    raise Refused(404, f"step {step} has no completion {link.group}/{link.index}")


SAMPLE = Page("/samples/{step}/{group}/{index}", _sample, "sample.html")
