"""What is journalled. A run's state is the fold of these and of nothing else.

Fields hold JSON's own types and the enums of `vocabulary`; a new field needs a default, so that older journals
still read.
"""

from __future__ import annotations

from typing import get_args

from policies.model.events.machines import (
    BuyingResumed,
    BuyingStopped,
    FleetSized,
    JobExited,
    JobRestarted,
    MachineBought,
    MachineEvent,
    NodeMoved,
    NodeRequested,
    RebalanceRecommended,
)
from policies.model.events.money import (
    BudgetNeared,
    BudgetReached,
    BudgetRefused,
    BudgetSet,
    CapacityMissing,
    DeadlineMissed,
    MoneyEvent,
)
from policies.model.events.run import (
    CommandTaken,
    DataSetAside,
    GatewayRestarted,
    NodesGenerate,
    Noticed,
    RunCreated,
    RunEvent,
    RunMoved,
    SpecProved,
    StoreCaughtUp,
    StoreSlowed,
    TookOver,
    TrainerGenerates,
)
from policies.model.events.timelines import (
    Diverged,
    DivergenceCleared,
    DivergenceWatched,
    Exported,
    FleetMoved,
    HealthyChosen,
    ProbationPassed,
    RollbackBegun,
    TimelineEvent,
    TimelineForked,
    TimelineResumed,
    TrainerFenced,
)

Event = RunEvent | MoneyEvent | MachineEvent | TimelineEvent

EVENT_TYPES: dict[str, type[Event]] = {cls.__name__: cls for cls in get_args(Event)}

__all__ = [
    "EVENT_TYPES",
    "BudgetNeared",
    "BudgetReached",
    "BudgetRefused",
    "BudgetSet",
    "BuyingResumed",
    "BuyingStopped",
    "CapacityMissing",
    "CommandTaken",
    "DataSetAside",
    "DeadlineMissed",
    "Diverged",
    "DivergenceCleared",
    "DivergenceWatched",
    "Event",
    "Exported",
    "FleetMoved",
    "FleetSized",
    "GatewayRestarted",
    "HealthyChosen",
    "JobExited",
    "JobRestarted",
    "MachineBought",
    "MachineEvent",
    "MoneyEvent",
    "NodeMoved",
    "NodeRequested",
    "NodesGenerate",
    "Noticed",
    "ProbationPassed",
    "RebalanceRecommended",
    "RollbackBegun",
    "RunCreated",
    "RunEvent",
    "RunMoved",
    "SpecProved",
    "StoreCaughtUp",
    "StoreSlowed",
    "TimelineEvent",
    "TimelineForked",
    "TimelineResumed",
    "TookOver",
    "TrainerFenced",
    "TrainerGenerates",
]
