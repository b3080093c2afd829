"""Every family of runs, by what makes it hard to tell a healthy run from a diverging one."""

from __future__ import annotations

from dataclasses import dataclass

from tests.generators.divergence.adapters import ADAPTERS_DIVERGING, ADAPTERS_HEALTHY
from tests.generators.divergence.born import BORN_DIVERGING, BORN_HEALTHY
from tests.generators.divergence.diverging import DIVERGING
from tests.generators.divergence.early_signs import EARLY_DIVERGING, EARLY_HEALTHY
from tests.generators.divergence.estimators import ESTIMATORS_DIVERGING, ESTIMATORS_HEALTHY
from tests.generators.divergence.healthy import HEALTHY, Family
from tests.generators.divergence.luck import LUCK_DIVERGING, LUCK_HEALTHY
from tests.generators.divergence.one_prompt import ONE_PROMPT_DIVERGING, ONE_PROMPT_HEALTHY
from tests.generators.divergence.rewards import REWARDS_DIVERGING, REWARDS_HEALTHY
from tests.generators.divergence.texture import TEXTURE_DIVERGING, TEXTURE_HEALTHY
from tests.generators.divergence.witnesses import WITNESSES_DIVERGING, WITNESSES_HEALTHY


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
