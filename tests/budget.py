"""How long a property is tried for: at length in CI, shortly by a person after a change."""

from __future__ import annotations

import os


def examples(most: int) -> int:
    """Return how many examples to try: `most` where CI is set, a fifth of them elsewhere."""
    return most if os.environ.get("CI") else most // 5
