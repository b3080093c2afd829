"""Read and check the environment variables that the controller sets for a node's work."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.security.vouched import read_signed_run
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.node_contract import (
    ATTEMPT_ENV,
    NODE_ENV,
    RUN_ENV,
    TIMELINE_ENV,
    TOKEN_ENV,
    WORKDIR_ENV,
)
from grpo_orch.policies.model.vocabulary import Precedence, precedence_of


class NodeEnvMissing(Exception):
    """A variable is missing that every node of a run has."""


@dataclass(frozen=True, slots=True)
class NodeEnv:
    """A node's environment, see `node_contract`. `host` is the address at which others reach this machine."""

    run: str
    node: str
    token: str
    attempt: int
    timeline: int
    workdir: str
    host: str  # GRPO_ORCH_NODE_HOST

    @property
    def precedence(self) -> Precedence:
        """The precedence of this attempt over others."""
        return precedence_of(self.timeline, self.node, self.attempt)


def read_node_env() -> NodeEnv:
    """Read the environment. Raises NodeEnvMissing with the name of a missing variable."""
    try:
        return NodeEnv(
            run=os.environ[RUN_ENV],
            node=os.environ[NODE_ENV],
            token=os.environ[TOKEN_ENV],
            attempt=int(os.environ[ATTEMPT_ENV]),
            timeline=int(os.environ.get(TIMELINE_ENV, "0")),
            workdir=os.environ[WORKDIR_ENV],
            host=os.environ.get("GRPO_ORCH_NODE_HOST", "127.0.0.1"),
        )
    except KeyError as error:
        raise NodeEnvMissing(f"{error.args[0]} is not set; only the controller starts a node's work") from error


def read_run_here(store: Store, token: str) -> RunRecord:
    """Read the run's record, verified by its secret, with `workdir` set to this machine's folder of run.yaml.

    A cloud machine has a copy of that folder, and its work starts there. Raises UntrustedRun, StoreError.
    """
    record = read_signed_run(store, token)
    if record.spec.cloud == "local":
        return record
    return replace(record, spec=replace(record.spec, workdir=os.getcwd()))
