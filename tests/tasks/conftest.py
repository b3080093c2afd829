"""The simulated machine of these tests."""

from __future__ import annotations

from tests.rigs.rollout_machine import machine as machine
