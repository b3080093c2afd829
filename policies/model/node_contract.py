"""What the launch of a node's work and that work agree on: variables of the environment, modules, names of files.

`orchestrator` starts the work and may not import it, nor the work what started it.
"""

from __future__ import annotations

from policies.model.vocabulary import Role

RUN_ENV = "GRPO_ORCH_RUN"  # the store's URL
NODE_ENV = "GRPO_ORCH_NODE"  # the node's name
TOKEN_ENV = "GRPO_ORCH_TOKEN"  # the run's secret
ATTEMPT_ENV = "GRPO_ORCH_ATTEMPT"  # which run of the node's work this is
TIMELINE_ENV = "GRPO_ORCH_TIMELINE"  # the timeline that the trainer goes on with
DEAD_MAN_ENV = "GRPO_ORCH_DEAD_MAN_S"  # silence of the run after which the work ends by itself; 0: never
WORKDIR_ENV = "GRPO_ORCH_WORKDIR"  # a folder of this machine alone, gone with it

WORK = {Role.TRAINER: "tasks.machine.trainer_machine", Role.ROLLOUT: "tasks.rollout.agent"}
GATEWAY = "orchestrator.gateway"  # beside the trainer
TRAINER = "tasks.trainer.main"  # below `WORK[Role.TRAINER]`
EVALUATOR = "tasks.evaluating.main"  # in its place, where the run is an evaluation
LOCAL_MACHINE = "tasks.machine.local_machine"  # above the work, on the local cloud

MACHINE = "machine.json"  # in the machine's folder: its newest attempt, see `tasks.machine.children`

# In the machine's working folder:
NOTICE = "notice"  # it will be taken back: how many seconds it stays, or nothing
REBALANCE = "rebalance"  # the cloud recommended a rebalance
SPOOL = "spool"  # a link to the spool, wherever that is
SPOOL_PREFIX = "grpo-orch-"  # of the names of spools: nothing else that the link leads to is ever removed
