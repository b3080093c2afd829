"""A Pydantic model, as a user's module has one."""

from __future__ import annotations

from pydantic import BaseModel


class Counted(BaseModel):
    """What a completion should be."""

    n: int
