"""The rig as fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.sky.image import image
from tests.rigs.sky.missing import missing
from tests.rigs.sky.rig import ROOT, SkyRig


@pytest.fixture(scope="session")
def sky_image() -> Path:
    """The machines' image; the first test that asks for it may wait for minutes. Skips where no rig can run."""
    if reason := missing():
        pytest.skip(f"no rig for SkyPilot: {reason}")
    return image(ROOT / "build")


@pytest.fixture(scope="module")
def sky_rig(sky_image: Path) -> Iterator[SkyRig]:
    """A rig for the tests of one file, without SkyPilot's API server: `start_api_server`."""
    with SkyRig(sky_image) as rig:
        yield rig
