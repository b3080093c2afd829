"""The daemon's log is read by people in trouble and by programs: a line is JSON and lacks nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime

BUG = """
from orchestrator.control import daemon
daemon.log_as_json()
try:
    {}["missing"]
except KeyError:
    daemon.log.exception("tick_failed")
"""


def test_a_bug_is_logged_with_its_traceback_and_the_moment() -> None:
    done = subprocess.run([sys.executable, "-c", BUG], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert (said["event"], said["level"]) == ("tick_failed", "error")
    assert "KeyError: 'missing'" in said["exception"]
    assert datetime.fromisoformat(said["timestamp"]).utcoffset() is not None
