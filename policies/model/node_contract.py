"""The contract between a node's launcher and its work: environment variables, modules, file names.

`orchestrator` starts the work; neither imports the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_orch.policies.model.vocabulary import Role

RUN_ENV = "GRPO_ORCH_RUN"  # the store's URL
NODE_ENV = "GRPO_ORCH_NODE"  # the node's name
TOKEN_ENV = "GRPO_ORCH_TOKEN"  # the run's secret
ATTEMPT_ENV = "GRPO_ORCH_ATTEMPT"  # number of this run of the node's work
TIMELINE_ENV = "GRPO_ORCH_TIMELINE"  # the timeline that the trainer continues
DEAD_MAN_ENV = "GRPO_ORCH_DEAD_MAN_S"  # the work ends after this long without contact from the run; 0: never
WORKDIR_ENV = "GRPO_ORCH_WORKDIR"  # a folder on this machine, lost with it

WORK = {Role.TRAINER: "grpo_orch.tasks.machine.trainer_machine", Role.ROLLOUT: "grpo_orch.tasks.rollout.agent"}
GATEWAY = "grpo_orch.orchestrator.gateway"  # next to the trainer
TRAINER = "grpo_orch.tasks.trainer.main"  # started by `WORK[Role.TRAINER]`
EVALUATOR = "grpo_orch.tasks.evaluating.evaluator"  # instead of the trainer, if the run is an evaluation
LOCAL_MACHINE = "grpo_orch.tasks.machine.local_machine"  # starts the work on the local cloud

MACHINE = "machine.json"  # in the machine's folder: its newest attempt, as an AttemptRecord

# In the machine's working folder:
NOTICE = "notice"  # the preemption notice: the seconds that remain, or empty
REBALANCE = "rebalance"  # the cloud recommended a rebalance
SPOOL = "spool"  # a link to the spool
SPOOL_PREFIX = "grpo-orch-"  # of spool names: no other target of the link is ever removed


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """The newest attempt of a node's work on a machine, run by process `pid`.

    `exit_code` is None until the attempt has ended. `reason` is the work's own explanation of its end.
    """

    attempt: int
    exit_code: int | None = None
    pid: int = 0
    reason: str = ""
