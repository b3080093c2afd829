"""SkyPilot's adapter without a cloud, in a process with a home of its own: what it asks for, and whom."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("sky") is None, reason="SkyPilot is not installed: pip install 'grpo-orch[sky]'"
)
TIMEOUT_S = 120.0
PRELUDE = """
    import json, os
    from orchestrator.clouds import skypilot
    from orchestrator.clouds.protocol import CloudUnavailable
    from orchestrator.clouds.sky_work import Work

    def work(**resources):
        secrets = {"TOKEN": "open-sesame"}
        return Work(setup="true", run="true", resources=resources, env={"A": "b"}, secrets=secrets, files={},
                    workdir=None)
"""


def run(home: Path, story: str, **environment: str) -> dict[str, Any]:
    """Run a story in a process that has this home; it prints one line of JSON, and nothing else may."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SKYPILOT_")}
    off = {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "HOME": str(home), "PYTHONPATH": os.getcwd()}
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PRELUDE) + textwrap.dedent(story)],
        env={**inherited, **off, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("\n") == 1, ended.stdout
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_a_task_keeps_alternatives_and_hides_secrets(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        places = [{"infra": "aws/us-east-1"}, {"infra": "gcp", "labels": {"team": "b"}}]
        given = dict(any_of=places, use_spot=True, labels={"team": "a"})
        some, ordered = (skypilot._task("n-1", work(**given)), skypilot._task("n-1", work(ordered=places)))
        print(json.dumps({
            "any": sorted([str(one.cloud), one.region, one.use_spot, one.labels] for one in some.resources),
            "ordered": [str(one.cloud) for one in ordered.resources],
            "types": [type(task.resources).__name__ for task in (some, ordered)],
            "kept": repr(some.to_yaml_config(use_user_specified_yaml=True)),
            "sent": some.to_yaml_config()["secrets"],
            "untouched": places[1]["labels"],
        }))
        """,
    )
    assert found["any"] == [
        ["AWS", "us-east-1", True, {"team": "a", "grpo-orch": "n-1"}],
        ["GCP", None, True, {"team": "b", "grpo-orch": "n-1"}],
    ]
    assert found["ordered"] == ["AWS", "GCP"]
    assert found["types"] == ["set", "list"]
    assert "sesame" not in found["kept"]
    assert found["sent"] == {"TOKEN": "open-sesame"}
    assert found["untouched"] == {"team": "b"}


def test_an_api_server_elsewhere_that_is_away_is_told_and_none_is_started_here(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        found = run(
            tmp_path,
            """
            asked = {}
            sky = skypilot.SkyPilot()
            for name, call in {
                "silent": lambda: sky.confirm("n-1", 0.5),
                "clusters": lambda: sky.clusters(""),
            }.items():
                try:
                    call()
                except CloudUnavailable as error:
                    asked[name] = str(error)
            print(json.dumps(asked))
            """,
            SKYPILOT_API_SERVER_ENDPOINT=f"http://me:open-sesame@127.0.0.1:{port}",
        )
    assert found["silent"].startswith("SkyPilot has not done it within 0.5 s")
    assert f"127.0.0.1:{port} does not answer" in found["clusters"]
    assert "sesame" not in json.dumps(found)
    assert not (tmp_path / ".sky" / "api_server" / "server.log").exists()
