"""The two phase tables: every legal edge with its reason for existing, and an error for any other."""

from __future__ import annotations

from policies.model.vocabulary import NodePhase as N
from policies.model.vocabulary import RunPhase as R

NODE_EDGES: dict[tuple[N, N], str] = {
    (N.REQUESTED, N.BOOTING): "the cloud shows the machine",
    (N.REQUESTED, N.REFUSED): "the cloud would not give it",
    (N.REQUESTED, N.TERMINATING): "no longer wanted",
    (N.REQUESTED, N.GONE): "lost before it was ever seen up",
    (N.BOOTING, N.SERVING): "its work was seen: in the membership, or a heartbeat",
    (N.BOOTING, N.DRAINING): "a preemption notice while booting",
    (N.BOOTING, N.TERMINATING): "no longer wanted, or it did not come up in time",
    (N.BOOTING, N.GONE): "the cloud no longer has it",
    (N.SERVING, N.BOOTING): "its work ended or left the membership while the machine is up",
    (N.SERVING, N.DRAINING): "a preemption notice, or the fleet is shrinking",
    (N.SERVING, N.TERMINATING): "no longer wanted",
    (N.SERVING, N.GONE): "the cloud no longer has it",
    (N.DRAINING, N.TERMINATING): "drained",
    (N.DRAINING, N.GONE): "the cloud took it",
    (N.TERMINATING, N.GONE): "the cloud confirms it is gone",
}

RUN_EDGES: dict[tuple[R, R], str] = {
    (R.STARTING, R.TRAINING): "the trainer made its first heartbeat",
    (R.STARTING, R.STOPPING): "asked to stop",
    (R.STARTING, R.FAILED): "the trainer cannot start",
    (R.STARTING, R.FINISHED): "nothing was left to train",
    (R.TRAINING, R.FINISHED): "the trainer reached its last step",
    (R.TRAINING, R.STOPPING): "asked to stop",
    (R.TRAINING, R.FAILED): "the trainer fails again and again without a step of progress",
    (R.STARTING, R.PAUSED): "it diverged, and a person is to decide",
    (R.TRAINING, R.PAUSED): "it diverged, and a person is to decide",
    (R.STARTING, R.GAVE_UP): "it diverged, and the budget of rollbacks is spent",
    (R.TRAINING, R.GAVE_UP): "it diverged, and the budget of rollbacks is spent",
    (R.STOPPING, R.STOPPED): "every machine is gone",
    (R.STOPPING, R.STARTING): "resumed before it had stopped",
    (R.STOPPED, R.STARTING): "resumed",
    (R.FAILED, R.STARTING): "resumed after a repair",
    (R.PAUSED, R.STARTING): "rolled back by hand",
    (R.GAVE_UP, R.STARTING): "rolled back by hand",
}

TERMINAL_RUN = frozenset({R.FINISHED, R.STOPPED, R.FAILED, R.PAUSED, R.GAVE_UP})
LIVE_NODE = frozenset({N.REQUESTED, N.BOOTING, N.SERVING, N.DRAINING})


class IllegalMove(Exception):
    """A phase change that the tables do not know: a bug in a decision, never a user's mistake."""


def check_node_move(old: N, new: N) -> None:
    """Raise IllegalMove unless NODE_EDGES has the edge."""
    if (old, new) not in NODE_EDGES:
        raise IllegalMove(f"node: {old} -> {new} is not in the table")


def check_run_move(old: R, new: R) -> None:
    """Raise IllegalMove unless RUN_EDGES has the edge."""
    if (old, new) not in RUN_EDGES:
        raise IllegalMove(f"run: {old} -> {new} is not in the table")
