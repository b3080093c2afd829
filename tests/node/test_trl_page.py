"""docs/trl_fields.py names every argument of the GRPOTrainer that is installed."""

from __future__ import annotations

import inspect

from docs.trl_fields import ARGUMENTS


def test_every_argument_is_in_one_row() -> None:
    from trl import GRPOTrainer

    assert sorted([*(row.names for row in ARGUMENTS), "self"]) == sorted(
        inspect.signature(GRPOTrainer.__init__).parameters
    )
