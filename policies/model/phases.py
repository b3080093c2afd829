"""The phase tables of nodes, runs and rollbacks: every legal edge with its reason. The fold refuses any other.

`make pages` draws them in docs/phases.md.
"""

from __future__ import annotations

from typing import TypeVar

from grpo_orch.policies.model.vocabulary import NodePhase as N
from grpo_orch.policies.model.vocabulary import RollbackStage as S
from grpo_orch.policies.model.vocabulary import RunPhase as R

Phase = TypeVar("Phase", N, R, S | None)

NODE_EDGES: dict[tuple[N, N], str] = {
    (N.REQUESTED, N.BOOTING): "the cloud lists the machine",
    (N.REQUESTED, N.REFUSED): "the cloud refused the machine",
    (N.REQUESTED, N.TERMINATING): "no longer wanted, or its launch failed and left a machine",
    (N.REQUESTED, N.GONE): "lost before it was up",
    (N.BOOTING, N.SERVING): "its work started: it joined the membership, or sent a heartbeat",
    (N.BOOTING, N.DRAINING): "a preemption notice while booting",
    (N.BOOTING, N.TERMINATING): "no longer wanted, or its work did not start in time",
    (N.BOOTING, N.GONE): "the cloud no longer has it",
    (N.SERVING, N.BOOTING): "its work ended or left the gateway while the machine is up",
    (N.SERVING, N.DRAINING): "a preemption notice, or a trainer stores its state before it ends",
    (N.SERVING, N.TERMINATING): "no longer wanted, or unresponsive while its machine is up",
    (N.SERVING, N.GONE): "the cloud no longer has it",
    (N.DRAINING, N.TERMINATING): "drained, or the wait for it has expired",
    (N.DRAINING, N.BOOTING): "its work failed before everything was stored, and its machine is kept",
    (N.DRAINING, N.GONE): "preempted",
    (N.TERMINATING, N.GONE): "the cloud confirms it is gone",
}

RUN_EDGES: dict[tuple[R, R], str] = {
    (R.STARTING, R.TRAINING): "the trainer sent its first heartbeat",
    (R.STARTING, R.STOPPING): "stop requested",
    (R.STARTING, R.FAILED): "run.yaml or the checkpoints cannot be used, or the trainer fails repeatedly",
    (R.STARTING, R.FINISHED): "no steps were left to train",
    (R.TRAINING, R.FINISHED): "the trainer reached its last step",
    (R.TRAINING, R.STOPPING): "stop requested",
    (R.TRAINING, R.FAILED): "run.yaml or the checkpoints cannot be used, or the trainer fails repeatedly",
    (R.TRAINING, R.PARKED): "no rollout node is available, and waiting has cost as much as a restart",
    (R.PARKED, R.STARTING): "a rollout node has a machine, or the trainer failed before everything was stored",
    (R.PARKED, R.STOPPING): "stop requested",
    (R.PARKED, R.FINISHED): "the trainer had reached its last step",
    (R.PARKED, R.FAILED): "the trainer ended for a reason that another attempt would not fix",
    (R.PARKED, R.PAUSED): "its last steps diverged or ran out of memory, and a person is to decide",
    (R.PARKED, R.GAVE_UP): "its last steps diverged, and the budget of rollbacks is spent",
    (R.STARTING, R.PAUSED): "it diverged or ran out of memory, and a person is to decide",
    (R.TRAINING, R.PAUSED): "it diverged or ran out of memory, and a person is to decide",
    (R.STARTING, R.GAVE_UP): "it diverged, and the budget of rollbacks is spent",
    (R.TRAINING, R.GAVE_UP): "it diverged, and the budget of rollbacks is spent",
    (R.STOPPING, R.STOPPED): "every machine is gone",
    (R.STOPPING, R.PAUSED): "every machine is gone, and a person is to decide on the budget",
    (R.STOPPING, R.STARTING): "resumed before it had stopped",
    (R.STOPPED, R.STARTING): "resumed, or rolled back by hand",
    (R.FINISHED, R.STARTING): "resumed with more steps",
    (R.FAILED, R.STARTING): "resumed after a repair, or rolled back by hand",
    (R.PAUSED, R.STARTING): "rolled back by hand, or resumed with another budget",
    (R.GAVE_UP, R.STARTING): "rolled back by hand",
}

# None: no rollback is in progress, because there was none or the last one has passed its probation.
ROLLBACK_EDGES: dict[tuple[S | None, S | None], str] = {
    (None, S.BEGUN): "the run diverged or ran out of memory, or a user requests it",
    (S.BEGUN, S.FORKED): "the new timeline is in the store",
    (S.FORKED, S.FENCED): "the old trainer has ended",
    (S.FENCED, S.RESUMED): "a trainer trains on the new timeline",
    (S.RESUMED, S.PROBATION): "a rollout node serves a policy of the new timeline, or the trainer generates",
    (S.PROBATION, None): "the new timeline passed the old one's trip by the required number of steps",
    (S.BEGUN, S.BEGUN): "a user requests another rollback, which replaces this one",
    (S.FORKED, S.BEGUN): "a user requests another rollback",
    (S.FENCED, S.BEGUN): "a user requests another rollback",
    (S.RESUMED, S.BEGUN): "the new timeline diverged or ran out of memory, or a user requests another rollback",
    (S.PROBATION, S.BEGUN): "the new timeline diverged or ran out of memory, or a user requests another rollback",
}

LIVE_RUN = frozenset({R.STARTING, R.TRAINING, R.PARKED})
TERMINAL_RUN = frozenset({R.FINISHED, R.STOPPED, R.FAILED, R.PAUSED, R.GAVE_UP})
LIVE_NODE = frozenset({N.REQUESTED, N.BOOTING, N.SERVING, N.DRAINING})
FILLING_NODE = LIVE_NODE - {N.DRAINING}  # phases in which the slot needs no other node
# No trainer trains on the new timeline yet: only a user may begin another rollback.
UNTRAINED_ROLLBACK = frozenset({S.BEGUN, S.FORKED, S.FENCED})
