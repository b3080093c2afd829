"""Symptoms of a divergence: KL, reward, gradients, entropy, completions or sampler leave their own past.

All signals but the reward and its witnesses are judged by their logarithm, or by their log odds if they are
shares: by what factor they exceed what their past explains. Only a large KL is proof on its own: rewards dip and
recover, answers get shorter when a format is learnt, and entropy falls in every healthy run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from grpo_orch.policies.detect.signals import (
    HUGE,
    PAST_POINTS,
    WINDOW_POINTS,
    Series,
    Shift,
    around,
    dated,
    explained,
    follow_series,
    median,
    noise_of_mean,
    resolution,
)

KL, REWARD = "kl", "reward"
CLIPPED = "completions/clipped_ratio"
NO_VARIANCE = "frac_reward_zero_std"
SAMPLING = "sampling/sampling_logp_difference/mean"
LENGTH = "completions/mean_length"
ENTROPY = "entropy"
KL_SEQUENCE = "kl_sequence"
# Prefix of a score that is logged and not trained on, so reward hacking does not raise it.
WITNESS = "witness/"
# A symptom exceeds what the past explains by this factor, a strong one by its square. Healthy gradients and
# lengths vary by less.
FACTOR = 3.0
# A change of the reward, or of a logarithm, by this many wobbles is significant; a collapse is twice that.
SURE_WOBBLES = 3.0
# Points. While KL is small, a fallen reward and one weak symptom must last this long, because dips recover.
# Signals that left their past longer apart are unrelated. Three times that is permanent: a run that lost
# everything it had learnt, or that never began to learn.
LASTING_POINTS = 20
# Assumed completion length if KL is a sum over the completion and its length is not logged, as in logs of PPO.
SEQUENCE_TOKENS = 50.0


@dataclass(frozen=True, slots=True)
class Symptom:
    """A signal that left its past. Symptoms of the same group count once."""

    group: str
    text: str
    onset_step: int
    calm_step: int
    points: int  # since `calm_step`
    strong: bool = False
    lowest_step: int = 0  # of a fallen reward, the step of its lowest level


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal that is a symptom if it leaves its past in the direction of `sign`.

    Values below `floor` are ignored: KL and sampler differ by that much through rounding, and a share below a half
    is not a majority.
    """

    name: str
    words: str
    group: str
    sign: float
    floor: float = 1e-6


SIGNALS = (
    Signal("grad_norm", "gradient norm", "gradients", 1.0),
    Signal(ENTROPY, "entropy", "entropy", -1.0, 0.01),
    Signal(ENTROPY, "entropy", "entropy", 1.0, 0.01),
    Signal(LENGTH, "completion length", "completions", 1.0),
    Signal(LENGTH, "completion length", "completions", -1.0),
    Signal(CLIPPED, "the completions are cut", "completions", 1.0, 0.5),
    Signal(NO_VARIANCE, "the groups have equal rewards", "variance", 1.0, 0.5),
    Signal(SAMPLING, "sampling difference", "sampling", 1.0, 0.03),
)
KL_SIGNAL = Signal(KL, "KL", "kl", 1.0, 1e-4)
SHARES = frozenset({CLIPPED, NO_VARIANCE})
FLOORS = {signal.name: signal.floor for signal in (*SIGNALS, KL_SIGNAL)}


def follow_signals(series: Mapping[str, Series], step: int, values: Mapping[str, float]) -> dict[str, Series]:
    """Return the series after another point; `values` are its finite values."""
    scores = (REWARD, *(name for name in values if name.startswith(WITNESS)))
    logged = {name: values[name] for name in (*scores, *FLOORS) if name in values}
    if KL not in logged and KL_SEQUENCE in values:
        logged[KL] = values[KL_SEQUENCE] / max(1.0, values.get(LENGTH, SEQUENCE_TOKENS))
    if logged.get("grad_norm", 0.0) <= 0.0:  # a step without gradients: all groups had equal rewards
        logged.pop("grad_norm", None)
    after = dict(series)
    if _has_other_prompts(series):  # new prompts have no past; the policy, and so KL, is the same
        after = {KL: series[KL]}
    for name, value in logged.items():
        # A signed KL estimate can fall below 0 as KL rises: use its distance from 0.
        value = abs(value) if name == KL else value
        level = value if name in scores else _logarithm(value, FLOORS[name], share=name in SHARES)
        after[name] = follow_series(after.get(name, Series()), step, level)
    return after


def _has_other_prompts(series: Mapping[str, Series]) -> bool:
    """Return whether the prompts have suddenly become harder.

    That is: from one point to the next the reward falls, and the length changes or the entropy rises, while KL is
    below a third of a nat and does not grow. No update changes the completions and leaves KL unchanged. A policy
    that breaks at a small KL writes endless answers, or always the same answer.
    """
    if KL not in series or series[KL].sustained(1.0) >= -math.log(FACTOR):
        return False
    names = (KL, REWARD, LENGTH, ENTROPY, CLIPPED)
    jumps = {name: _jump(signal) for name, signal in series.items() if name in names}
    sure = {name: jump for name, jump in jumps.items() if abs(jump) >= SURE_WOBBLES * series[name].wobble > 0}
    if jumps[KL] >= math.log(FACTOR) or sure.get(REWARD, 0.0) >= 0.0 or jumps.get(CLIPPED, 0.0) > 0.0:
        return False
    return sure.get(ENTROPY, 0.0) > 0.0 or (LENGTH in sure and ENTROPY not in sure)


def _jump(series: Series) -> float:
    """Return the difference of the last and the first half of the window; 0 for a ramp instead of a step."""
    half = WINDOW_POINTS // 2
    before, after = series.recent[:half], series.recent[half:]
    if len(series.recent) < WINDOW_POINTS:
        return 0.0
    jump = median(after) - median(before)
    step = min(after) - max(before) if jump > 0 else max(after) - min(before)
    return jump if jump and step / jump > 1 / 2 else 0.0


def _logarithm(value: float, floor: float, *, share: bool) -> float:
    value = min(max(value, floor), 0.97 if share else HUGE)
    return math.log(value / (1 - value) if share else value)


def natural(signal: Signal, level: float) -> float:
    """Return the logged value for a logarithm or log odds."""
    return 1 / (1 + math.exp(-level)) if signal.name in SHARES else math.exp(level)


def symptoms(series: Mapping[str, Series]) -> tuple[Symptom, ...]:
    """Return the symptoms of the last points, except KL's, the reward's first."""
    found = [_collapse(REWARD, "reward", series.get(REWARD))]
    found += [symptom(signal, series.get(signal.name)) for signal in SIGNALS if _has_past(series.get(signal.name))]
    return tuple(symptom for symptom in found if symptom is not None)


def _has_past(series: Series | None) -> bool:
    """Return whether a full window precedes the present one, so that the past is more than a first value."""
    return series is not None and series.points >= 2 * WINDOW_POINTS


def hacked_witnesses(series: Mapping[str, Series]) -> tuple[Symptom, ...]:
    """Return the witnesses that have collapsed while the trained reward surely rose (reward hacking)."""
    witnesses = [_collapse("witness", name, score) for name, score in series.items() if name.startswith(WITNESS)]
    reward = series.get(REWARD)
    return tuple(
        replace(witness, text=f"{witness.text}, while the reward rose")
        for witness in witnesses
        if witness is not None and gained_wobbles(reward, witness.calm_step) >= SURE_WOBBLES
    )


def symptom(signal: Signal, series: Series | None) -> Symptom | None:
    """Return the symptom of a signal that exceeds what its past explains by FACTOR and by more than its noise."""
    if series is None or series.points <= WINDOW_POINTS:
        return None
    by = signal.sign * (series.sustained(signal.sign) - explained(series, signal.sign))
    least = math.log(FACTOR)
    if by < least:
        return None
    shift = dated(series, signal.sign, by)
    if by < min(2 * SURE_WOBBLES * series.wobble / _rooted(shift.points), 2 * least):
        return None
    level, calm = natural(signal, series.sustained(signal.sign)), natural(signal, shift.calm)
    if signal.name in SHARES:
        text = f"{level:.0%} of {signal.words}, {calm:.0%} or less at step {shift.calm_step}"
    else:
        factor = as_factor(level, calm)
        text = f"{signal.words} {level:.3g}, {factor} its calm level of {calm:.3g} at step {shift.calm_step}"
    return _of(signal.group, text, shift, strong=by >= 2 * least)


def gained_wobbles(reward: Series | None, since_step: int) -> float:
    """Return by how many wobbles the reward is higher than at `since_step`."""
    if reward is None or reward.start is None:
        return 0.0
    gain = reward.sustained(1.0) - reward.level_at(since_step)
    return gain / reward.wobble if reward.wobble else math.copysign(HUGE, gain) if gain else 0.0


def is_endless(series: Mapping[str, Series]) -> bool:
    """Return whether nearly all completions are cut, and at most half were at the start."""
    cut = series.get(CLIPPED)
    return cut is not None and cut.levels[0] <= 0.0 and cut.sustained(1.0) >= 2 * math.log(FACTOR)


def best_until(reward: Series | None) -> int:
    """Return the last step with the best reward, if the reward has surely risen or fallen; else 0."""
    if reward is None or reward.start is None:
        return 0
    sure, best = SURE_WOBBLES * reward.wobble, max(reward.levels)
    if best - min(reward.start, reward.levels[-1]) <= 2 * sure:
        return 0
    # A level is a running median, so half of its window may already be worse.
    return max(end for end, level in zip(reward.ends, reward.levels, strict=True) if level >= best - sure / 2)


def learnt_until(reward: Series | None) -> int:
    """Return the last step before the reward had surely risen, if it has surely fallen since; else 0.

    KL changes until then were learning; no divergence began before.
    """
    if reward is None or reward.start is None:
        return 0
    sure = SURE_WOBBLES * reward.wobble
    gained = [i for i, level in enumerate(reward.levels) if level >= reward.start + 2 * sure]
    if not gained or max(reward.levels) - reward.levels[-1] <= sure:
        return 0
    return reward.ends[gained[0] - 1] if gained[0] else 0


def _collapse(group: str, words: str, reward: Series | None) -> Symptom | None:
    """Return the symptom of a significant fall by at least half of the gain. Longer falls may be smaller."""
    if reward is None or reward.start is None:
        return None
    top = explained(reward, -1.0, concave=False)
    fell = top - reward.sustained(-1.0)
    if fell <= max(SURE_WOBBLES * reward.wobble, (top - reward.start) / 2, resolution(top)):
        return None
    shift = dated(reward, -1.0, fell, ramp=False)
    if shift.points > PAST_POINTS:
        return None
    before, after = around(reward, shift.points)
    is_sure = (before - after) * _rooted(shift.points) >= 2 * SURE_WOBBLES * noise_of_mean(reward, 1)
    if not is_sure or before - after <= max(SURE_WOBBLES * reward.wobble, (before - reward.start) / 2):
        return None
    text = f"{words} {after:.3g}, fallen from {before:.3g} since step {shift.calm_step}"
    since = [(level, end) for level, end in zip(reward.levels, reward.ends, strict=True) if end > shift.calm_step]
    _, lowest_step = min(since, default=(0.0, shift.calm_step))
    return replace(_of(group, text, shift), lowest_step=lowest_step)


def _rooted(points: int) -> float:
    """Return the factor by which noise shrinks over `points`: longer changes may be smaller."""
    return math.sqrt(max(points / WINDOW_POINTS, 1.0))


def _of(group: str, text: str, shift: Shift, *, strong: bool = False) -> Symptom:
    return Symptom(group, text, shift.onset_step, shift.calm_step, shift.points, strong)


def as_factor(level: float, calm: float) -> str:
    """Describe a factor: "41 times" or "1/36 of"."""
    return f"{_plain(level / calm)} times" if level >= calm else f"1/{_plain(calm / level)} of"


def _plain(factor: float) -> str:
    """Format two significant digits without an exponent: 1.4, 41, 270, 1,400."""
    rounded = float(f"{factor:.2g}")
    return f"{rounded:,.{1 if rounded < 10 else 0}f}"
