"""The user's settings of SkyPilot, `~/.sky/config.yaml`, for a machine that has a SkyPilot of its own."""

from __future__ import annotations

from typing import Any

_LEFT_HERE = ("admin_policy", "api_server", "db")  # code, a server and a database that are not there
_PROXY = "ssh_proxy_command"


def settings_elsewhere(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that hold on a machine among those that it launches, as SkyPilot's own controllers get them.

    It reaches them without a proxy. One that is named by region stays as the region's name: no other is used.
    """
    return {key: _without_proxies(value) for key, value in settings.items() if key not in _LEFT_HERE}


def _without_proxies(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_proxies(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: _no_proxy(one) if key == _PROXY else _without_proxies(one) for key, one in value.items()}


def _no_proxy(command: Any) -> dict[str, None] | None:
    return dict.fromkeys(command) if isinstance(command, dict) else None
