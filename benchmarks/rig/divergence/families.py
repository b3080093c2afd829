"""Every family of runs, by what makes it hard to tell a healthy run from a diverging one."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.rig.divergence.adapters import ADAPTERS_DIVERGING, ADAPTERS_HEALTHY
from benchmarks.rig.divergence.born import BORN_DIVERGING, BORN_HEALTHY
from benchmarks.rig.divergence.diverging import DIVERGING
from benchmarks.rig.divergence.early_signs import EARLY_DIVERGING, EARLY_HEALTHY
from benchmarks.rig.divergence.estimators import ESTIMATORS_DIVERGING, ESTIMATORS_HEALTHY
from benchmarks.rig.divergence.healthy import HEALTHY, Family
from benchmarks.rig.divergence.luck import LUCK_DIVERGING, LUCK_HEALTHY
from benchmarks.rig.divergence.one_prompt import ONE_PROMPT_DIVERGING, ONE_PROMPT_HEALTHY
from benchmarks.rig.divergence.rewards import REWARDS_DIVERGING, REWARDS_HEALTHY
from benchmarks.rig.divergence.texture import TEXTURE_DIVERGING, TEXTURE_HEALTHY
from benchmarks.rig.divergence.witnesses import WITNESSES_DIVERGING, WITNESSES_HEALTHY


@dataclass(frozen=True, slots=True)
class Cause:
    """The families of one cause."""

    healthy: tuple[Family, ...]
    diverging: tuple[Family, ...]

    @property
    def families(self) -> tuple[Family, ...]:
        return (*self.healthy, *self.diverging)


CAUSES = {
    "textbook": Cause(HEALTHY, DIVERGING),
    "luck": Cause(LUCK_HEALTHY, LUCK_DIVERGING),
    "adapters": Cause(ADAPTERS_HEALTHY, ADAPTERS_DIVERGING),
    "rewards": Cause(REWARDS_HEALTHY, REWARDS_DIVERGING),
    "one prompt a step": Cause(ONE_PROMPT_HEALTHY, ONE_PROMPT_DIVERGING),
    "born broken": Cause(BORN_HEALTHY, BORN_DIVERGING),
    "early signs": Cause(EARLY_HEALTHY, EARLY_DIVERGING),
    "estimators": Cause(ESTIMATORS_HEALTHY, ESTIMATORS_DIVERGING),
    "witnesses": Cause(WITNESSES_HEALTHY, WITNESSES_DIVERGING),
    "texture": Cause(TEXTURE_HEALTHY, TEXTURE_DIVERGING),
}
