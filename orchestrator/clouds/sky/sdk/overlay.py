"""What a run adds to the user's configuration of SkyPilot, for its own requests. Imports no SkyPilot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_GROUP = ("aws", "security_group_name")


def own_group(config: Any, group: str) -> None:
    """Have clusters whose names begin with `group` in a security group of that name.

    SkyPilot's own is one for whatever a user launches from one host: these machines reach each other, those that
    the same user launches from another host are shut out, and nobody can tell when it is not needed any more.
    A group that the user's configuration names is kept to.
    """
    named = config.get_nested(_GROUP, default_value=[])
    if isinstance(named, list):
        config.set_nested(_GROUP, [*named, {f"{group}*": group}])


def keep_home(config: Any, withheld: Iterable[str]) -> None:
    """Have no machine get these clouds' credentials. The user's own setting is kept."""
    for cloud in withheld:
        if config.get_nested((cloud, "remote_identity"), default_value=None) is None:
            config.set_nested((cloud, "remote_identity"), "NO_UPLOAD")
