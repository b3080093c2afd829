"""The simulated gateway of these tests."""

from __future__ import annotations

import pytest

from tests.rigs.gateway_world import World


@pytest.fixture
def world() -> World:
    return World()
