"""What a node is told by whoever started it: environment variables, read once at the start of each process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

RUN = "GRPO_ORCH_RUN"
NODE = "GRPO_ORCH_NODE"
TOKEN = "GRPO_ORCH_TOKEN"
ATTEMPT = "GRPO_ORCH_ATTEMPT"
TIMELINE = "GRPO_ORCH_TIMELINE"
WORKDIR = "GRPO_ORCH_WORKDIR"


class BadNodeEnv(Exception):
    """A variable is missing or of the wrong form: whoever started this process left it out."""


@dataclass(frozen=True, slots=True)
class NodeEnv:
    """Who this process is, and for which run."""

    run: str  # the store's URL
    node: str
    token: str  # the run's secret
    attempt: int
    timeline: int
    workdir: str  # scratch folder of this node


def read_node_env(environ: Mapping[str, str] = os.environ) -> NodeEnv:
    """Raises BadNodeEnv naming the variable."""
    missing = [name for name in (RUN, NODE, TOKEN, WORKDIR) if not environ.get(name)]
    if missing:
        raise BadNodeEnv(f"{', '.join(missing)} must be set; `grpo-orch up` does so")
    try:
        attempt, timeline = int(environ.get(ATTEMPT, "1")), int(environ.get(TIMELINE, "0"))
    except ValueError as error:
        raise BadNodeEnv(f"{ATTEMPT} and {TIMELINE} must be whole numbers") from error
    return NodeEnv(environ[RUN], environ[NODE], environ[TOKEN], attempt, timeline, environ[WORKDIR])
