"""What a machine of the run is told when its work is started: its environment, read once and checked."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from checkpoint.records.documents import RunRecord
from checkpoint.security.vouched import read_vouched_run
from checkpoint.store.run_store import Store
from policies.model.vocabulary import Precedence, precedence_of


class NotANode(Exception):
    """The environment lacks what every node of a run is given."""


@dataclass(frozen=True, slots=True)
class NodeEnv:
    """One node's environment."""

    run: str  # GRPO_ORCH_RUN: the store's URL
    node: str  # GRPO_ORCH_NODE
    token: str  # GRPO_ORCH_TOKEN: the run's secret
    attempt: int  # GRPO_ORCH_ATTEMPT: which run of the node's work this is
    timeline: int  # GRPO_ORCH_TIMELINE: the timeline that the trainer goes on with
    workdir: str  # GRPO_ORCH_WORKDIR: a folder of this machine alone, gone with it
    host: str  # GRPO_ORCH_NODE_HOST: the address at which other machines reach this one

    @property
    def precedence(self) -> Precedence:
        """What this attempt has over others."""
        return precedence_of(self.timeline, self.node, self.attempt)


def read_node_env() -> NodeEnv:
    """Read it. Raises NotANode naming the variable that is missing."""
    try:
        return NodeEnv(
            run=os.environ["GRPO_ORCH_RUN"],
            node=os.environ["GRPO_ORCH_NODE"],
            token=os.environ["GRPO_ORCH_TOKEN"],
            attempt=int(os.environ["GRPO_ORCH_ATTEMPT"]),
            timeline=int(os.environ.get("GRPO_ORCH_TIMELINE", "0")),
            workdir=os.environ["GRPO_ORCH_WORKDIR"],
            host=os.environ.get("GRPO_ORCH_NODE_HOST", "127.0.0.1"),
        )
    except KeyError as error:
        raise NotANode(f"{error.args[0]} is not set; a node's work is started by the controller") from error


def read_run_here(store: Store, token: str) -> RunRecord:
    """The run as its secret vouches for it, its `workdir` being where the folder of run.yaml is on this machine.

    A cloud's machine has a copy of that folder, and its work is started in it. Raises NotVouched, StoreError.
    """
    record = read_vouched_run(store, token)
    if record.spec.cloud == "local":
        return record
    return replace(record, spec=replace(record.spec, workdir=os.getcwd()))
