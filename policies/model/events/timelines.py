"""What is journalled of divergence and of rollbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.model.timelines import Fork
from policies.model.vocabulary import Cause


@dataclass(frozen=True, slots=True)
class DivergenceWatched:
    """Something is off since `onset_step`. `evidence` is one sentence per signal, the strongest first."""

    timeline: int
    step: int
    onset_step: int
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DivergenceCleared:
    """What was watched has passed."""

    timeline: int
    step: int


@dataclass(frozen=True, slots=True)
class Diverged:
    """The detectors tripped: the trainer's own or, where it could not tell, the controller's."""

    timeline: int
    step: int
    onset_step: int
    evidence: tuple[str, ...]
    seen_by: str  # trainer, controller


@dataclass(frozen=True, slots=True)
class RollbackBegun:
    """The intent to go on with `fork`: target and changes are chosen, nothing has happened yet."""

    fork: Fork
    cause: Cause
    from_step: int  # how far the timeline before had come
    reason: str
    effects: Mapping[str, str] = field(default_factory=dict)  # what each change does, by key of `grpo`


@dataclass(frozen=True, slots=True)
class TimelineForked:
    """The fork is in the store. From here on the run is on `timeline`, and an older trainer stops."""

    timeline: int


@dataclass(frozen=True, slots=True)
class TrainerFenced:
    """No trainer of an older timeline is left."""

    timeline: int


@dataclass(frozen=True, slots=True)
class TimelineResumed:
    """A trainer trains on the new timeline, from `step`."""

    timeline: int
    step: int


@dataclass(frozen=True, slots=True)
class FleetMoved:
    """The first rollout node serves a policy of the new timeline."""

    timeline: int
    policy: str  # PolicyVersion as text


@dataclass(frozen=True, slots=True)
class ProbationPassed:
    """The new timeline came far enough beyond the old one's trip."""

    timeline: int
    step: int


@dataclass(frozen=True, slots=True)
class HealthyChosen:
    """The run ends diverged: this is its last healthy checkpoint, to be exported. None: there is none."""

    version: str | None  # PolicyVersion as text


@dataclass(frozen=True, slots=True)
class Exported:
    """The weights of a checkpoint lie in the store below `prefix`, as files for `from_pretrained`. If it is
    empty, they could not be exported."""

    version: str
    prefix: str


TimelineEvent = (
    DivergenceWatched
    | DivergenceCleared
    | Diverged
    | RollbackBegun
    | TimelineForked
    | TrainerFenced
    | TimelineResumed
    | FleetMoved
    | ProbationPassed
    | HealthyChosen
    | Exported
)
