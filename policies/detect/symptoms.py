"""What leaves its own past when a policy breaks: KL, reward, gradients, entropy, completions, the sampler.

All but the reward and its witnesses are judged alike, by the logarithm of the signal, or of its odds where it is
a share: how many times it is what its own past explains. None but a KL that is large by itself proves anything
alone: rewards dip and recover, answers get shorter when a format is learnt, entropy falls in every healthy run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from policies.detect.signals import (
    HUGE,
    PAST_POINTS,
    WINDOW_POINTS,
    Series,
    Shift,
    around,
    dated,
    explained,
    follow_series,
    lucky,
    median,
    resolution,
)

KL, REWARD = "kl", "reward"
CLIPPED = "completions/clipped_ratio"
NO_VARIANCE = "frac_reward_zero_std"
SAMPLING = "sampling/sampling_logp_difference/mean"
LENGTH = "completions/mean_length"
ENTROPY = "entropy"
KL_SEQUENCE = "kl_sequence"
# Before the name of a score that is logged and not trained on: what a reward that is tricked does not raise.
WITNESS = "witness/"
# Times what the past explains, of every signal; that squared is strong. Gradients and lengths vary by less.
FACTOR = 3.0
# Wobbles of the reward, or of a logarithm: a change of so many is no luck. A collapse is twice that.
SURE_WOBBLES = 3.0
# Points. While the KL is small, a fallen reward and one weak symptom must last: dips of the reward recover. What
# left its past so long before the others has nothing to do with them. Three times that is for good: a run that
# lost all it had learnt, or that never began to learn.
LASTING_POINTS = 20
# Tokens of a completion where the KL is a sum over it and its length isn't logged, as in logs of PPO.
SEQUENCE_TOKENS = 50.0


@dataclass(frozen=True, slots=True)
class Symptom:
    """One signal that left its past. Those of one group go together and count once."""

    group: str
    text: str
    onset_step: int
    calm_step: int
    points: int  # since it was last seen as before
    strong: bool = False
    lowest_step: int = 0  # of a reward, since it fell


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal whose leaving its past in the direction of `sign` is a symptom.

    `floor`: under it there is nothing to tell: KL and sampler differ by so much for no reason but their precision,
    and a share under a half is not most.
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
    Signal(CLIPPED, "the completions are cut at their longest", "completions", 1.0, 0.5),
    Signal(NO_VARIANCE, "the groups have no variance", "variance", 1.0, 0.5),
    Signal(SAMPLING, "sampling difference", "sampling", 1.0, 0.03),
)
KL_SIGNAL = Signal(KL, "KL", "kl", 1.0, 1e-4)
SHARES = frozenset({CLIPPED, NO_VARIANCE})
FLOORS = {signal.name: signal.floor for signal in (*SIGNALS, KL_SIGNAL)}


def follow_signals(series: Mapping[str, Series], step: int, values: Mapping[str, float]) -> dict[str, Series]:
    """Return the series after one more point, of which `values` are the finite ones."""
    scores = (REWARD, *(name for name in values if name.startswith(WITNESS)))
    told = {name: values[name] for name in (*scores, *FLOORS) if name in values}
    if KL not in told and KL_SEQUENCE in values:
        told[KL] = values[KL_SEQUENCE] / max(1.0, values.get(LENGTH, SEQUENCE_TOKENS))
    if told.get("grad_norm", 0.0) <= 0.0:  # a step without one: all groups had one reward each
        told.pop("grad_norm", None)
    after = dict(series)
    if _other_prompts(series):  # what was is no past of what they bring; the policy, and so the KL, is the same
        after = {KL: series[KL]}
    for name, value in told.items():
        # An estimate of the KL with a sign sinks as it climbs: what it is away from 0 is what it has to say.
        value = abs(value) if name == KL else value
        level = value if name in scores else _logarithm(value, FLOORS[name], share=name in SHARES)
        after[name] = follow_series(after.get(name, Series()), step, level)
    return after


def _other_prompts(series: Mapping[str, Series]) -> bool:
    """Whether the data have become harder at once: from one point to the next the reward falls and the length is
    another or the entropy rises, and the KL, still below a third of a nat, does not grow.

    No update changes what is written and leaves the KL as it was. A policy that breaks at a small KL goes to
    answers without end, or to one answer.
    """
    if KL not in series or series[KL].sustained(1.0) >= -math.log(FACTOR):
        return False
    jumps = {name: _jump(one) for name, one in series.items() if name in (KL, REWARD, LENGTH, ENTROPY, CLIPPED)}
    sure = {name: jump for name, jump in jumps.items() if abs(jump) >= SURE_WOBBLES * series[name].wobble > 0}
    if jumps[KL] >= math.log(FACTOR) or sure.get(REWARD, 0.0) >= 0.0 or jumps.get(CLIPPED, 0.0) > 0.0:
        return False
    return sure.get(ENTROPY, 0.0) > 0.0 or (LENGTH in sure and ENTROPY not in sure)


def _jump(series: Series) -> float:
    """By how much the last half of the window is apart from the first, if it is more of a step than of a ramp."""
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
    """What was logged, of its logarithm."""
    return 1 / (1 + math.exp(-level)) if signal.name in SHARES else math.exp(level)


def symptoms(series: Mapping[str, Series]) -> tuple[Symptom, ...]:
    """Return every symptom that the last points show, without the KL's, the reward's first."""
    found = [_collapse(REWARD, "reward", series.get(REWARD))]
    found += [symptom(signal, series.get(signal.name)) for signal in SIGNALS if _has_past(series.get(signal.name))]
    return tuple(symptom for symptom in found if symptom is not None)


def _has_past(series: Series | None) -> bool:
    """Return whether there is a full window before the present one: with less, a first value would be the past."""
    return series is not None and series.points >= 2 * WINDOW_POINTS


def tricked(series: Mapping[str, Series]) -> tuple[Symptom, ...]:
    """Return the witnesses that have fallen, as a reward does, while the reward that is trained surely rose."""
    fallen = [_collapse("witness", name, one) for name, one in series.items() if name.startswith(WITNESS)]
    reward = series.get(REWARD)
    return tuple(
        replace(one, text=f"{one.text}, while the reward rose")
        for one in fallen
        if one is not None and gained_wobbles(reward, one.calm_step) >= SURE_WOBBLES
    )


def symptom(signal: Signal, series: Series | None) -> Symptom | None:
    """Whether the signal is so many times what its past explains, and by more than it wobbles."""
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
        text = f"{level:.0%} of {signal.words}, at most {calm:.0%} at step {shift.calm_step}"
    else:
        factor = as_factor(level, calm)
        text = f"{signal.words} {level:.3g}, {factor} its calm level of {calm:.3g} at step {shift.calm_step}"
    return _of(signal.group, text, shift, strong=by >= 2 * least)


def gained_wobbles(reward: Series | None, since_step: int) -> float:
    """By how many wobbles the reward is higher than at that step."""
    if reward is None or reward.start is None:
        return 0.0
    gain = reward.sustained(1.0) - reward.level_at(since_step)
    return gain / reward.wobble if reward.wobble else math.copysign(HUGE, gain) if gain else 0.0


def endless(series: Mapping[str, Series]) -> bool:
    """Whether nearly all completions are cut at their longest, of which no more than half were at the start."""
    cut = series.get(CLIPPED)
    return cut is not None and cut.levels[0] <= 0.0 and cut.sustained(1.0) >= 2 * math.log(FACTOR)


def best_until(reward: Series | None) -> int:
    """Return the last step at which a reward that has surely gained or fallen stood at its best, else 0."""
    if reward is None or reward.start is None:
        return 0
    sure, best = SURE_WOBBLES * reward.wobble, max(reward.levels)
    if best - min(reward.start, reward.levels[-1]) <= 2 * sure:
        return 0
    # A level is a running median: half a window of it may already be worse.
    return max(end for end, level in zip(reward.ends, reward.levels, strict=True) if level >= best - sure / 2)


def learnt_until(reward: Series | None) -> int:
    """The last step before the reward had surely gained, where it has surely fallen since; 0 where not.

    Whatever the KL did until then was learning: no divergence began before.
    """
    if reward is None or reward.start is None:
        return 0
    sure = SURE_WOBBLES * reward.wobble
    gained = [i for i, level in enumerate(reward.levels) if level >= reward.start + 2 * sure]
    if not gained or max(reward.levels) - reward.levels[-1] <= sure:
        return 0
    return reward.ends[gained[0] - 1] if gained[0] else 0


def _collapse(group: str, words: str, reward: Series | None) -> Symptom | None:
    """A fall that takes half of what was gained, and is no luck: the longer it lasts, the smaller may it be."""
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
    sure = (before - after) * _rooted(shift.points) >= 2 * SURE_WOBBLES * lucky(reward, 1)
    if not sure or before - after <= max(SURE_WOBBLES * reward.wobble, (before - reward.start) / 2):
        return None
    text = f"{words} {after:.3g}, fallen from {before:.3g} since step {shift.calm_step}"
    since = [(level, end) for level, end in zip(reward.levels, reward.ends, strict=True) if end > shift.calm_step]
    _, lowest_step = min(since, default=(0.0, shift.calm_step))
    return replace(_of(group, text, shift), lowest_step=lowest_step)


def _rooted(points: int) -> float:
    """By what luck shrinks over so many points: the longer a change lasts, the smaller may it be."""
    return math.sqrt(max(points / WINDOW_POINTS, 1.0))


def _of(group: str, text: str, shift: Shift, *, strong: bool = False) -> Symptom:
    return Symptom(group, text, shift.onset_step, shift.calm_step, shift.points, strong)


def as_factor(level: float, calm: float) -> str:
    """In words, by what factor: "41 times" or "1/36 of"."""
    return f"{_plain(level / calm)} times" if level >= calm else f"1/{_plain(calm / level)} of"


def _plain(factor: float) -> str:
    """Two digits, with no exponent: 1.4, 41, 270, 1,400."""
    rounded = float(f"{factor:.2g}")
    return f"{rounded:,.{1 if rounded < 10 else 0}f}"
