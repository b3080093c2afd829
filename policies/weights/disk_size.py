"""`disk_size` of `resources`, read as SkyPilot 0.14.1 does.

Its schema (`MEMORY_SIZE_PATTERN` of `sky/skylet/constants.py`) takes whole numbers, or texts of digits and a unit;
then `parse_memory_resource` (`sky/utils/resources_utils.py`) wants whole GB of them, units being powers of 1024.
"""

from __future__ import annotations

import re

KEY = "disk_size"
EXPECTED = "expected whole GB, as 500, 500GB or 2TB"
_UNITS = ("k", "m", "g", "t", "p")  # each 1024 times the one before
_SIZE = re.compile(
    "([0-9]+)(" + "|".join(form for one in _UNITS for form in (f"{one}[bi]", f"{one.upper()}[BIbi]")) + ")?"
)


def gb_of(size: object) -> int | None:
    """The size in SkyPilot's GB, of 1024^3 bytes; None for what SkyPilot refuses."""
    found = _SIZE.fullmatch(str(size)) if isinstance(size, str | int) and not isinstance(size, bool) else None
    if found is None:
        return None
    steps = _UNITS.index(found[2][0].lower()) - _UNITS.index("g") if found[2] else 0
    gb, rest = divmod(int(found[1]) * 1024 ** max(0, steps), 1024 ** max(0, -steps))
    return gb if gb > 0 and not rest else None
