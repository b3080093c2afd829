"""The templates, with everything escaped, and how numbers and times are written in them."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from orchestrator.views.words.numbers import data_size, duration, short, usd, written
from orchestrator.views.words.text import shown


def _day_and_time(time_s: float) -> str:
    """`21 Nov 14:03:59`, local."""
    return written(time_s, "%d %b %H:%M:%S")


def _iso(time_s: float) -> str:
    return written(time_s, "%Y-%m-%dT%H:%M:%SZ", local=False)


def _as_text(value: Any) -> Any:
    """Every text that a template prints goes through `shown`."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else shown(value)


_environment = Environment(
    loader=PackageLoader("orchestrator.web"),
    autoescape=True,
    finalize=_as_text,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters.update(
    short=short,
    usd=lambda value: "–" if value is None else usd(value),
    duration=lambda value: "–" if value is None else duration(value),
    data_size=data_size,
    time=_day_and_time,
    iso=_iso,
    cut=shown,
)


def render(template: str, data: dict[str, Any]) -> str:
    """Draw a template."""
    return _environment.get_template(template).render(data)
