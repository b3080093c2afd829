"""A gateway that takes nobody for silent, and moves no request to where it would be done sooner.

It is for tests of what does not depend on time: beside it a node may be slow, or stand still, for however long.
"""

from __future__ import annotations

import sys

from policies.serving import wire
from tests.budget import HANG_S

wire.HOLD_S = wire.SILENT_S = HANG_S  # before they are imported from there

from orchestrator.gateway import __main__ as gateway  # noqa: E402
from orchestrator.gateway.routing import watch  # noqa: E402
from policies.serving.silence import SilenceLimits  # noqa: E402

if __name__ == "__main__":
    SilenceLimits.soft_s = HANG_S  # type: ignore[misc]  # it is for ever elsewhere
    watch.SPEED_S = HANG_S  # of a member whose speed is not known nothing is taken
    sys.exit(gateway.main())
