"""One completion, whole, under a name that lasts as long as its step's samples are kept."""

from __future__ import annotations

from typing import Any

from orchestrator.samples import plain
from orchestrator.samples.choose import Found
from orchestrator.samples.steps import Link, NoSamples, find_step, groups_of, stored_steps
from orchestrator.web.page import Asked, Page, Refused
from orchestrator.web.watch import Look


def _data(look: Look, asked: Asked) -> dict[str, Any]:
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
                "prompt": plain.messages(group.prompt),
                "completion": plain.completion(one),
                "beside": len(group.samples),
            }
    raise Refused(404, f"step {step} has no completion {link.group}/{link.index}")


PAGE = Page("/samples/{step}/{group}/{index}", _data, "sample.html")
