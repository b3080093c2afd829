"""What is journalled of the run as a whole, and of its store."""

from __future__ import annotations

from dataclasses import dataclass

from policies.model.vocabulary import RunPhase


@dataclass(frozen=True, slots=True)
class RunCreated:
    """The first entry: the run exists and its spec is in the store."""

    name: str
    run_id: str


@dataclass(frozen=True, slots=True)
class TookOver:
    """A controller took the run; the entry's number is its epoch. `since_told_s`: how long ago the last event
    before it was journalled, by the store's clock; 0: not known."""

    host: str
    pid: int
    reason: str
    since_told_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunMoved:
    """The run changed its phase. `parked_s`: how long it was parked, where it was until now."""

    phase: RunPhase
    reason: str
    parked_s: float | None = None


@dataclass(frozen=True, slots=True)
class GatewayRestarted:
    """The gateway came back as another process."""

    boot_id: str


@dataclass(frozen=True, slots=True)
class CommandTaken:
    """A user's command was read from the store and will not be read again."""

    command_id: str
    kind: str


@dataclass(frozen=True, slots=True)
class Noticed:
    """A pitfall was seen in the metrics: what it is, and what to do."""

    kind: str
    step: int
    text: str


@dataclass(frozen=True, slots=True)
class StoreSlowed:
    """A checkpoint was put off at `step`: earlier ones are still being stored. `stored_step` is the newest
    stored one's, 0 while there is none."""

    step: int
    stored_step: int


@dataclass(frozen=True, slots=True)
class StoreCaughtUp:
    """There is room for checkpoints again."""

    step: int
    stored_step: int


@dataclass(frozen=True, slots=True)
class TrainerGenerates:
    """No rollout node is there, and the trainer makes the completions itself, from `step` on. `waited_s`: for how
    long there had been no machine; None: there is one, and it does not serve."""

    step: int
    waited_s: float | None = None


@dataclass(frozen=True, slots=True)
class NodesGenerate:
    """They are made by rollout nodes again, after so long."""

    step: int
    lasted_s: float


@dataclass(frozen=True, slots=True)
class SpecProved:
    """A trainer has come as far as training: run.yaml, its data and its rewards can be worked with."""


@dataclass(frozen=True, slots=True)
class DataSetAside:
    """An optional object of the store, or part of it, cannot be read and is left out; a command is moved away."""

    key: str
    why: str


RunEvent = (
    RunCreated
    | TookOver
    | RunMoved
    | GatewayRestarted
    | CommandTaken
    | Noticed
    | StoreSlowed
    | StoreCaughtUp
    | TrainerGenerates
    | NodesGenerate
    | SpecProved
    | DataSetAside
)
