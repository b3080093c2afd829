"""The rig as fixtures. Every process of the tests imports them, and the rig imports moto for a second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.rigs.sky.image import image
from tests.rigs.sky.missing import missing

if TYPE_CHECKING:
    from tests.rigs.sky.rig import SkyRig

BUILD = Path(__file__).parents[3] / "build"


@pytest.fixture(scope="session")
def sky_image() -> Path:
    """The machines' image; the first test that asks for it may wait for minutes. Skips where no rig can run."""
    if reason := missing():
        pytest.skip(f"no rig for SkyPilot: {reason}")
    return image(BUILD)


@pytest.fixture(scope="module")
def sky_rig(sky_image: Path) -> Iterator[SkyRig]:
    """A rig for the tests of one file."""
    from tests.rigs.sky.rig import SkyRig

    with SkyRig(sky_image) as rig:
        yield rig
