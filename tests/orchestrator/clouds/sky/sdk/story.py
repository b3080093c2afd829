"""Runs a story about SkyPilot's adapter in a process with a home of its own: SkyPilot is told nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.budget import HANG_S

needs_sky = pytest.mark.skipif(
    find_spec("sky") is None, reason="SkyPilot is not installed: pip install 'grpo-orch[sky]'"
)
PRELUDE = """
    import json, os, sys
    import structlog
    from grpo_orch.orchestrator.clouds.sky import aws, skypilot
    from grpo_orch.orchestrator.clouds.protocol import CloudUnavailable
    from grpo_orch.orchestrator.clouds.sky.work import Work
    from sky.utils import annotations

    annotations.is_on_api_server = False  # as any call of the SDK makes it
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # as the command line does

    def sent():
        # The settings that go along with a request.
        from sky.server.requests.payloads import RequestBody

        return RequestBody().override_skypilot_config

    def work(**resources):
        secrets = {"TOKEN": "open-sesame"}
        return Work(setup="true", run="true", resources=resources, env={"A": "b"}, secrets=secrets, files={},
                    workdir=None)
"""


def run(home: Path, *story: str, **environment: str) -> dict[str, Any]:
    """Run a story, its parts indented each by itself, in a process that has this home.

    It prints one line of JSON, and nothing else may.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SKYPILOT_")}
    off = {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "HOME": str(home), "PYTHONPATH": os.getcwd()}
    ended = subprocess.run(
        [sys.executable, "-c", "".join(map(textwrap.dedent, (PRELUDE, *story)))],
        env={**inherited, **off, **environment},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("\n") == 1, f"{ended.stdout}\n{ended.stderr}"
    found: dict[str, Any] = json.loads(ended.stdout)
    return found
