"""The user's settings of SkyPilot for a machine elsewhere: a table."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.clouds.sky.remote import settings_elsewhere

SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    (
        {
            "api_server": {"endpoint": "https://me:secret@sky.example.com"},
            "admin_policy": "mine.Policy",
            "db": "postgresql://me:secret@db.example.com/sky",
        },
        {},
    ),
    (
        {"aws": {"vpc_name": "training", "use_internal_ips": True, "ssh_proxy_command": "ssh -W %h:%p me@jump"}},
        {"aws": {"vpc_name": "training", "use_internal_ips": True, "ssh_proxy_command": None}},
    ),
    (
        {"gcp": {"ssh_proxy_command": {"us-west1": "ssh -W %h:%p me@west", "us-east1": None}}},
        {"gcp": {"ssh_proxy_command": {"us-west1": None, "us-east1": None}}},
    ),
    (
        {"workspaces": {"rl": {"clouds": [{"ssh_proxy_command": "ssh me@jump"}, "gcp"]}}},
        {"workspaces": {"rl": {"clouds": [{"ssh_proxy_command": None}, "gcp"]}}},
    ),
]


@pytest.mark.parametrize(("here", "there"), SETTINGS)
def test_settings_hold_elsewhere_without_servers_code_and_proxies(
    here: dict[str, Any], there: dict[str, Any]
) -> None:
    assert settings_elsewhere(here) == there
