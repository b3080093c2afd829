"""Detect a divergence in the metrics that a trainer logs: healthy, watch, or tripped, and since which step.

Pure and incremental: the trainer follows each point as it is logged, the controller follows the stored rows, and
both reach the same verdict.

KL is judged by its excess over what the run's own past explains, in nats per token: an excess of one nat trips.
The limit is lower if other signals leave their past at the same time, and higher if the reward has surely risen
meanwhile. If KL is small or not logged, a collapsed reward or exploding gradients need a second signal. Slow
losses are detected over longer windows (`policies.detect.slides`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from grpo_orch.policies.detect.signals import WINDOW_POINTS, Series, around, dated, explained
from grpo_orch.policies.detect.slides import slide_symptoms
from grpo_orch.policies.detect.symptoms import (
    CLIPPED,
    FACTOR,
    KL,
    KL_SIGNAL,
    LASTING_POINTS,
    NO_VARIANCE,
    REWARD,
    SURE_WOBBLES,
    Symptom,
    best_until,
    follow_signals,
    gained_wobbles,
    hacked_witnesses,
    is_endless,
    learnt_until,
    symptom,
    symptoms,
)

# Maximum unexplained KL in nats per token: without a gain in reward, and the allowance for the surest gain. Runs
# that learn an answer format reach 3 to 4.
KL_UNPAID = 1.0
KL_PAID = 5.0
# Maximum KL in nats per token, whatever the past or the reward: the policy writes text the reference never would.
KL_BROKEN = 20.0
# A single NaN is a bad batch; four in a row mean a broken policy. Gradients alone may overflow while mixed
# precision searches for its loss scale, which starts at 2^16 and halves with every step.
NOT_FINITE_POINTS = 4
OVERFLOW_STEPS = 16
NOT_FINITE = ("kl", "loss", "reward", "grad_norm")


# The logged metrics cannot distinguish a harder task from a policy that forgets.
TASK_HINT = (
    "if the tasks became harder then, add the step to policies.kl.task_changes, or use detect --task-change"
)


class Health(StrEnum):
    """The health of a run."""

    HEALTHY = "healthy"
    WATCH = "watch"  # possible divergence; earlier checkpoints are kept
    TRIPPED = "tripped"  # divergence; permanent


# Logged points from the first bad update to the trip: the median measured by `make bench-detect`.
TYPICAL_DELAY_POINTS = 11


@dataclass(frozen=True, slots=True)
class Point:
    """The metrics logged at a step, by TRL's names.

    Values may be NaN or infinite. None stands for null; it counts as not finite only in a column that has had a
    number, because some frameworks write null in columns that they never log.
    """

    step: int
    values: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict after a point.

    `onset_step` is the first step that the current excursion may have affected, None while healthy; checkpoints of
    earlier steps are unaffected. `evidence` has a sentence per signal, the strongest first.
    """

    health: Health = Health.HEALTHY
    step: int = 0
    onset_step: int | None = None
    tripped_step: int | None = None
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Detector:
    """The state between two points. JSON types only, of bounded size.

    `not_finite` holds, by signal, the number of consecutive points that were not finite, and a step before them.
    `numbers` names the signals of NOT_FINITE that have had a finite value. `quiet` counts the points since the
    last symptom.
    """

    verdict: Verdict = Verdict()
    points: int = 0
    signals: dict[str, Series] = field(default_factory=dict)
    not_finite: dict[str, tuple[int, int]] = field(default_factory=dict)
    numbers: tuple[str, ...] = ()
    quiet: int = 0


def follow(
    detector: Detector, point: Point, limit: float | None = None, task_changes: Collection[int] = ()
) -> Detector:
    """Return the detector after the next logged point. Never raises.

    Args:
        limit: `policies.kl.limit`, the maximum KL above its initial value; None if not set.
        task_changes: `policies.kl.task_changes`, the first steps of new tasks. Every signal but KL starts over
            there, because rewards of the old task say nothing about the new one.
    """
    before = detector.verdict
    if point.step <= before.step:
        return detector
    if before.health is Health.TRIPPED:
        return replace(detector, verdict=replace(before, step=point.step), points=detector.points + 1)
    if any(before.step < step <= point.step for step in task_changes):
        detector = replace(detector, signals={KL: detector.signals[KL]} if KL in detector.signals else {})
    after = _remember(detector, point)
    health, found = _judge(after, point.step, limit)
    if health is Health.HEALTHY:
        if before.health is Health.HEALTHY or detector.quiet == WINDOW_POINTS:
            return replace(after, verdict=Verdict(step=point.step))
        return replace(after, verdict=replace(before, step=point.step), quiet=detector.quiet + 1)
    onset = _onset(found, after.signals.get(REWARD))
    if health is Health.WATCH and before.onset_step is not None:
        # Keeps earlier checkpoints. A trip is dated by the evidence of its point.
        onset = min(onset, before.onset_step)
    evidence = tuple(symptom.text for symptom in found)
    if health is not Health.TRIPPED:
        return replace(after, verdict=Verdict(health, point.step, onset, None, evidence))
    if any(symptom.group == REWARD for symptom in found):
        evidence += (TASK_HINT,)
    return replace(after, verdict=Verdict(health, point.step, onset, point.step, evidence))


def trip_at(detector: Detector, step: int, onset_step: int, evidence: str) -> Detector:
    """Return the detector tripped at `step` by evidence that is not in a logged point."""
    before = detector.verdict
    if before.health is Health.TRIPPED:
        return detector
    onset = max(1, onset_step if before.onset_step is None else min(onset_step, before.onset_step))
    return replace(detector, verdict=Verdict(Health.TRIPPED, step, onset, step, (evidence,)))


def _remember(detector: Detector, point: Point) -> Detector:
    finite = {name: value for name, value in point.values.items() if value is not None and math.isfinite(value)}
    # An infinite KL in the loss makes the gradients infinite. If they are finite, only the logged mean of KL
    # overflowed, at single tokens. An infinite loss or reward reaches the gradients or stops them.
    valid = finite.keys() | ({KL} if finite.get("grad_norm", 0.0) > 0.0 else set())
    not_finite = {name: count for name, count in detector.not_finite.items() if name not in valid}
    for name in NOT_FINITE:
        if name not in point.values or name in valid:
            continue
        if point.values[name] is not None or name in detector.numbers:
            # If a point covers several steps, the previous point may cover some that were not finite; skip those.
            count, since = not_finite.get(name, (0, 2 * detector.verdict.step - point.step))
            not_finite[name] = (count + 1, since)
    signals = follow_signals(detector.signals, point.step, finite)
    numbers = tuple(name for name in NOT_FINITE if name in detector.numbers or name in finite)
    return Detector(detector.verdict, detector.points + 1, signals, not_finite, numbers)


def _judge(detector: Detector, step: int, limit: float | None) -> tuple[Health, Sequence[Symptom]]:
    """Return the health and its evidence, the strongest symptom first."""
    series = detector.signals
    kl, reward = series.get(KL), series.get(REWARD)
    certain = _not_finite(detector, step) or _over_limit(kl, limit) or _absurd(series)
    if certain:
        return Health.TRIPPED, certain
    hacked = hacked_witnesses(series)
    lost = slide_symptoms(series)
    if len(lost) > 1:
        return Health.TRIPPED, lost
    seen = (*symptoms(series), *hacked)
    credited = None if hacked or is_endless(series) else reward
    excursion = symptom(KL_SIGNAL, kl) if kl is not None and _excess(kl) > KL_UNPAID / FACTOR**4 else None
    health, found = Health.HEALTHY, list[Symptom]()
    if kl is not None and excursion is not None:
        has_fallen = any(sign.group == REWARD for sign in seen)
        health, found = _excursion(kl, credited, excursion, seen if has_fallen else (*seen, *lost))
    if health is Health.TRIPPED or not seen:
        return health, found
    rises = gained_wobbles(reward, min(sign.calm_step for sign in seen)) >= SURE_WOBBLES
    shown = [sign for sign in (*seen, excursion) if sign is not None and (sign.strong or not rises)]
    if _is_broken(reward, shown):
        return Health.TRIPPED, shown
    if hacked:
        lasts = any(sign.points >= LASTING_POINTS for sign in hacked)
        return (Health.TRIPPED if lasts else Health.WATCH), hacked
    groups = {sign.group for sign in shown}
    if len(groups) >= 2 or REWARD in groups:
        return Health.WATCH, shown
    return health, found


def _excursion(
    kl: Series, reward: Series | None, excursion: Symptom, seen: Sequence[Symptom]
) -> tuple[Health, list[Symptom]]:
    """Compare the unexplained KL with its limit, which other symptoms lower and a gain in reward raises."""
    excess = _excess(kl)
    wobbles = gained_wobbles(reward, excursion.calm_step)
    confirming = [
        sign
        for sign in seen
        if (sign.strong or (wobbles < SURE_WOBBLES and sign.group in (REWARD, "gradients", "witness")))
        and sign.points <= excursion.points + LASTING_POINTS
    ]
    paid = min(max(wobbles / SURE_WOBBLES, 0.0), KL_PAID)
    strength = {sign.group: 1 + sign.strong for sign in sorted(confirming, key=lambda sign: sign.strong)}
    limit = KL_UNPAID / FACTOR ** sum(strength.values()) + paid
    if excess > limit:
        return Health.TRIPPED, [excursion, *confirming]
    return Health.WATCH if excess > limit / FACTOR else Health.HEALTHY, [excursion]


def _not_finite(detector: Detector, step: int) -> list[Symptom]:
    return [
        Symptom("not finite", f"{name} was not finite for {count} points in a row", since, since, count)
        for name in NOT_FINITE
        for count, since in [detector.not_finite.get(name, (0, 0))]
        if count >= NOT_FINITE_POINTS and (name != "grad_norm" or step - since > OVERFLOW_STEPS + 1)
    ]


def _excess(kl: Series) -> float:
    """Return the KL that the past does not explain, in nats per token."""
    level = math.exp(kl.sustained(1.0))
    return level - math.exp(explained(kl, 1.0))


def _onset(found: Sequence[Symptom], reward: Series | None) -> int:
    """Return the first step that the excursion may have affected.

    A run that learnt something is never dated to its start: it was healthy until its reward last was at its best,
    or, if KL had left its past by then, until the reward had surely risen.
    """
    onset = min(symptom.onset_step for symptom in found)
    if onset > 1:
        return onset
    kl_onset = min((symptom.onset_step for symptom in found if symptom.group == KL), default=math.inf)
    best = best_until(reward)
    return max(1, best if best <= kl_onset else learnt_until(reward))


def _over_limit(kl: Series | None, limit: float | None) -> list[Symptom]:
    """Return the symptom of a KL above the user's limit."""
    if kl is None or kl.start is None or limit is None:
        return []
    level, start = math.exp(kl.sustained(1.0)), math.exp(kl.start)
    if level <= start + limit:
        return []
    text = f"KL {level:.3g}, above its initial value of {start:.3g} by more than the limit of {limit:g}"
    return [_since_calm(kl, math.log(level / (start + limit / 4)), text)]


def _absurd(series: Mapping[str, Series]) -> list[Symptom]:
    """Return symptoms that need no past: an extreme KL, or only cut completions and equal rewards from the start.

    The KL limit is lower if completions are cut or rewards are equal, and the reward has not risen.
    """
    saturated: list[Series] = []
    if gained_wobbles(series.get(REWARD), 0) < SURE_WOBBLES:
        most = 2 * math.log(FACTOR)
        shares = [series[name] for name in (CLIPPED, NO_VARIANCE) if name in series]
        saturated = [share for share in shares if share.sustained(1.0) >= most]
        always = [
            share for share in shares if share.points >= 3 * LASTING_POINTS and min(share.levels) >= most / 2
        ]
        if len(always) == 2:
            text = "since the start, all completions are cut and all groups have equal rewards"
            return [Symptom("mute", text, 0, 0, 0)]
    kl = series.get(KL)
    level = 0.0 if kl is None else math.exp(kl.sustained(1.0))
    if kl is None or level <= KL_BROKEN / FACTOR ** len(saturated):
        return []
    text = f"KL {level:.3g} nats per token, more than any gain in reward justifies"
    return [_since_calm(kl, math.log(FACTOR), text)]


def _since_calm(kl: Series, least: float, text: str) -> Symptom:
    shift = dated(kl, 1.0, max(kl.sustained(1.0) - explained(kl, 1.0), least))
    return Symptom("kl", text, shift.onset_step, shift.calm_step, shift.points)


def _is_broken(reward: Series | None, found: Sequence[Symptom]) -> bool:
    """Return whether a lasting fall of the reward, or the gradients, prove a divergence regardless of KL.

    Another signal must have left its past with them, or everything learnt must have been lost for long.
    """
    lead = next((sign for sign in found if sign.group in (REWARD, "gradients")), None)
    if lead is None:
        return False
    others = [sign for sign in found if sign.group != lead.group and sign.points <= lead.points + LASTING_POINTS]
    groups = {sign.group for sign in others}
    if lead.group != REWARD or reward is None or reward.start is None:
        return len(groups) >= 2
    if gained_wobbles(reward, lead.lowest_step) >= SURE_WOBBLES:
        return False
    if lead.points >= 3 * LASTING_POINTS and around(reward, lead.points)[1] <= reward.start + reward.wobble:
        return True
    is_lasting = lead.points >= LASTING_POINTS
    return len(groups) >= 2 or any(sign.strong or is_lasting for sign in others)
