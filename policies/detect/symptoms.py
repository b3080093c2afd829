"""What else leaves its own past when a policy breaks: gradients, entropy, rewards, completions, the sampler.

None of them proves anything by itself: rewards dip and recover, answers get shorter when a format is learnt,
entropy falls in every healthy run. Several at once, or one beside an excursion of the KL, do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from policies.detect.signals import BRIEF_POINTS, HUGE, Series, Shift, fall, rise, shift

CLIPPED = "completions/clipped_ratio"
NO_VARIANCE = "frac_reward_zero_std"
SAMPLING = "sampling/sampling_logp_difference/mean"
# A shift from a calm further back is not told: the run is like that now.
STALE_POINTS = 200
# Of the gain since the start and of the level itself a fall takes this share; or so many times the wobble and most
# of the gain, since rewards have no natural zero.
REWARD_SHARE = 0.5
REWARD_GAIN_SHARE = 0.8
REWARD_LEVEL_SHARE = 0.2
REWARD_WOBBLES = 8.0
# Where the fall began is where the reward last was within this share of its best.
REWARD_CALM_SHARE = 0.2
# A reward within this share of its gain, and the wobble, is at its best still.
NEAR_BEST_SHARE = 0.15
# A share that was under a half and has risen by so much: most completions are cut, most groups have one reward.
# Near one it is strong.
SHARE_CALM = 0.5
SHARE_RISE = 0.3
SHARE_STRONG = 0.45


@dataclass(frozen=True, slots=True)
class Symptom:
    """One signal that left its past. Those of one group go together and count once."""

    group: str
    text: str
    onset_step: int
    points: int  # since it was last seen as before
    strong: bool = False  # by twice the logarithm that makes it a symptom


@dataclass(frozen=True, slots=True)
class Signal:
    """A positive signal and the factor that makes it a symptom; levels under `floor` count as `floor`."""

    name: str
    words: str
    group: str
    sign: float  # 1 for a rise, -1 for a fall
    factor: float
    floor: float = 0.0


# The factors are beyond concave growth, or its reverse for falls. Norms of gradients have heavier tails than
# the others; lengths rarely have room for more than a factor of a few; a difference of the log-probabilities below
# 0.03 is what bf16 kernels make of the same weights.
SIGNALS = (
    Signal("grad_norm", "gradient norm", "gradients", 1.0, 5.0),
    Signal("entropy", "entropy", "entropy", -1.0, 3.0),
    Signal("entropy", "entropy", "entropy", 1.0, 2.5, floor=0.05),
    Signal("completions/mean_length", "completion length", "completions", 1.0, 2.5),
    Signal("completions/mean_length", "completion length", "completions", -1.0, 3.0),
    Signal(SAMPLING, "sampling difference", "sampling", 1.0, 5.0, floor=0.03),
)
LINEAR = frozenset({"reward", CLIPPED, NO_VARIANCE})


def symptoms(series: Mapping[str, Series], points: int) -> tuple[Symptom, ...]:
    """Return every symptom that the last points show, the reward's first."""
    reward = _reward_collapse(series.get("reward"), points)
    found = [reward, _clipped(series.get(CLIPPED), points)]
    if reward is not None:
        found.append(_no_variance(series.get(NO_VARIANCE), points))
    found += [_shifted(signal, series.get(signal.name), points) for signal in SIGNALS]
    return tuple(symptom for symptom in found if symptom is not None)


def reward_rises(reward: Series | None, since_step: int | None) -> bool:
    """Whether the reward is near its best and higher than it was at that step, or at the start for None."""
    if reward is None or reward.start is None:
        return False
    then = reward.start if since_step is None else reward.level_at(since_step)
    near = NEAR_BEST_SHARE * max(reward.best - reward.start, 0.0) + reward.wobble
    return reward.sustained(1.0, BRIEF_POINTS) > then + reward.wobble and reward.best - reward.now < near


def _reward_collapse(reward: Series | None, points: int) -> Symptom | None:
    if reward is None or reward.start is None or reward.best == -HUGE:
        return None
    best, gain = reward.best, max(reward.best - reward.start, 0.0)
    least = min(
        max(REWARD_SHARE * max(gain, abs(best)), REWARD_WOBBLES / 2 * reward.wobble),
        max(REWARD_GAIN_SHARE * gain, REWARD_LEVEL_SHARE * abs(best), REWARD_WOBBLES * reward.wobble),
    )
    fell = best - reward.sustained(-1.0, points)
    if fell < least or fell <= 0.0:
        return None
    fallen = fall(reward, best, max(reward.levels) - REWARD_CALM_SHARE * fell, points)
    text = f"reward {best - fell:.3g}, fallen from its best of {best:.3g} since step {fallen.calm_step}"
    return Symptom("reward", text, fallen.onset_step, fallen.points)


def _clipped(clipped: Series | None, points: int) -> Symptom | None:
    risen = _risen(clipped, points)
    if risen is None:
        return None
    share = risen.by + SHARE_CALM
    text = f"{share:.0%} of the completions are cut at their longest, under half until step {risen.calm_step}"
    return Symptom("completions", text, risen.onset_step, risen.points, strong=risen.by >= SHARE_STRONG)


def _no_variance(share: Series | None, points: int) -> Symptom | None:
    risen = _risen(share, points)
    if risen is None:
        return None
    now = risen.by + SHARE_CALM
    text = f"{now:.0%} of the groups have no variance, under half until step {risen.calm_step}"
    return Symptom("reward", text, risen.onset_step, risen.points)


def _risen(share: Series | None, points: int) -> Shift | None:
    if share is None or min(share.levels, default=1.0) > SHARE_CALM:
        return None
    risen = rise(share, SHARE_CALM, points)
    return risen if risen.by >= SHARE_RISE and risen.points <= STALE_POINTS else None


def _shifted(signal: Signal, series: Series | None, points: int) -> Symptom | None:
    if series is None:
        return None
    least = math.log(signal.factor)
    found = shift(series, signal.sign, points, least, math.log(signal.floor) if signal.floor else -HUGE)
    if found is None or found.points > STALE_POINTS:
        return None
    level, calm = math.exp(series.sustained(signal.sign, points)), math.exp(found.calm)
    factor = as_factor(level, calm)
    text = f"{signal.words} {level:.3g}, {factor} its calm level of {calm:.3g} at step {found.calm_step}"
    return Symptom(signal.group, text, found.onset_step, found.points, strong=found.by >= 2 * least)


def as_factor(level: float, calm: float) -> str:
    """In words, by what factor: "41 times" or "1/36 of"."""
    return f"{level / calm:.2g} times" if level >= calm else f"1/{calm / level:.2g} of"
