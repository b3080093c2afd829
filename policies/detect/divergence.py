"""Whether a run diverges, told from what its trainer logs: healthy, to be watched, or tripped, and since when.

Pure and incremental: the trainer follows each point as it is logged, the controller follows the stored rows, and
both come to the same verdict.

KL is judged by what of it the run's own past does not explain, in nats per token: one nat is too much, less where
other signals leave their past at the same time, more where the reward has surely gained meanwhile. Where the KL is
small, or is not logged, a reward that has collapsed or gradients that explode need another signal beside them.
What is lost slowly is told over longer windows (`policies.detect.slides`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from policies.detect.signals import WINDOW_POINTS, Series, around, dated, explained
from policies.detect.slides import slid
from policies.detect.symptoms import (
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
    endless,
    follow_signals,
    gained_wobbles,
    learnt_until,
    symptom,
    symptoms,
    tricked,
)

# Nats per token that the past does not explain. Without reference to anything else; and that the surest gain in
# reward is worth: formats are learnt at 3 to 4.
KL_UNPAID = 1.0
KL_PAID = 5.0
# Nats per token, whatever the past or the reward: the policy writes what the reference never would.
KL_BROKEN = 20.0
# NaN once is a bad batch, four times is a policy that is gone. Gradients alone overflow in the search of mixed
# precision for its loss scale, which begins at 2^16 and halves with every step.
NOT_FINITE_POINTS = 4
OVERFLOW_STEPS = 16
NOT_FINITE = ("kl", "loss", "reward", "grad_norm")


# Nothing that is logged tells a harder task from a policy that forgets.
TASK_HINT = (
    "if the tasks became harder there, name that step in policies.kl.task_changes, or to detect as --task-change"
)


class Health(StrEnum):
    """How a run is."""

    HEALTHY = "healthy"
    WATCH = "watch"  # something is off; the checkpoints from before it are kept
    TRIPPED = "tripped"  # it diverges; stays


# Logged points from the first bad update to the trip, the median of what `make bench-detect` measures.
TYPICAL_DELAY_POINTS = 11


@dataclass(frozen=True, slots=True)
class Point:
    """What was logged at one step, by TRL's names.

    NaN and infinity are what they are. None is a null: it counts as not finite only in a column that has had a
    number, because other frameworks write null in columns that they never log.
    """

    step: int
    values: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known after a point.

    `onset_step` is the first step that the excursion under way may have touched: a checkpoint of an earlier step
    is untouched. None while healthy. `evidence` is one sentence per signal, the strongest first.
    """

    health: Health = Health.HEALTHY
    step: int = 0
    onset_step: int | None = None
    tripped_step: int | None = None
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Detector:
    """The state between two points. JSON types only, and its size does not grow with the run.

    `not_finite` is by signal: the number of points in a row that were not finite, and a step from before them.
    `numbers` names the signals of NOT_FINITE that have had a finite value. `quiet` counts the points since the
    watched symptom was last seen.
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
    """Return the detector after one more logged point. Never raises.

    Args:
        limit: `policies.kl.limit`, KL above the run's own start; None where the user gave none.
        task_changes: `policies.kl.task_changes`, the first steps of new tasks. There every signal but the KL
            starts over: a harder task's rewards have no past.
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
        onset = min(onset, before.onset_step)  # watched checkpoints stay; a trip is dated by all evidence up to it
    evidence = tuple(symptom.text for symptom in found)
    if health is not Health.TRIPPED:
        return replace(after, verdict=Verdict(health, point.step, onset, None, evidence))
    if any(symptom.group == REWARD for symptom in found):
        evidence += (TASK_HINT,)
    return replace(after, verdict=Verdict(health, point.step, onset, point.step, evidence))


def trip_at(detector: Detector, step: int, onset_step: int, evidence: str) -> Detector:
    """Return the detector tripped at `step` by what no point tells."""
    before = detector.verdict
    if before.health is Health.TRIPPED:
        return detector
    onset = max(1, onset_step if before.onset_step is None else min(onset_step, before.onset_step))
    return replace(detector, verdict=Verdict(Health.TRIPPED, step, onset, step, (evidence,)))


def _remember(detector: Detector, point: Point) -> Detector:
    finite = {name: value for name, value in point.values.items() if value is not None and math.isfinite(value)}
    # An infinite KL in the loss makes the gradients so: where these are finite, it is the logged mean that
    # overflowed, at single tokens. What is infinite in the loss or the reward reaches the gradients or stops them.
    sound = finite.keys() | ({KL} if finite.get("grad_norm", 0.0) > 0.0 else set())
    not_finite = {name: count for name, count in detector.not_finite.items() if name not in sound}
    for name in NOT_FINITE:
        if name not in point.values or name in sound:
            continue
        if point.values[name] is not None or name in detector.numbers:
            # With several steps to a point the one before may hold some that were not finite: those are left out.
            count, since = not_finite.get(name, (0, 2 * detector.verdict.step - point.step))
            not_finite[name] = (count + 1, since)
    signals = follow_signals(detector.signals, point.step, finite)
    numbers = tuple(name for name in NOT_FINITE if name in detector.numbers or name in finite)
    return Detector(detector.verdict, detector.points + 1, signals, not_finite, numbers)


def _judge(detector: Detector, step: int, limit: float | None) -> tuple[Health, Sequence[Symptom]]:
    """Return how the run is and what tells it, the strongest first."""
    series = detector.signals
    kl, reward = series.get(KL), series.get(REWARD)
    gone = _not_finite(detector, step) or _over(kl, limit) or _absurd(series)
    if gone:
        return Health.TRIPPED, gone
    hacked = tricked(series)
    lost = slid(series)
    if len(lost) > 1:
        return Health.TRIPPED, lost
    seen = (*symptoms(series), *hacked)
    pays = None if hacked or endless(series) else reward
    excursion = symptom(KL_SIGNAL, kl) if kl is not None and _excess(kl) > KL_UNPAID / FACTOR**4 else None
    health, found = Health.HEALTHY, list[Symptom]()
    if kl is not None and excursion is not None:
        fallen = any(one.group == REWARD for one in seen)
        health, found = _excursion(kl, pays, excursion, seen if fallen else (*seen, *lost))
    if health is Health.TRIPPED or not seen:
        return health, found
    rises = gained_wobbles(reward, min(one.calm_step for one in seen)) >= SURE_WOBBLES
    shown = [one for one in (*seen, excursion) if one is not None and (one.strong or not rises)]
    if _broken(reward, shown):
        return Health.TRIPPED, shown
    if hacked:
        lasts = any(one.points >= LASTING_POINTS for one in hacked)
        return (Health.TRIPPED if lasts else Health.WATCH), hacked
    groups = {one.group for one in shown}
    if len(groups) >= 2 or REWARD in groups:
        return Health.WATCH, shown
    return health, found


def _excursion(
    kl: Series, reward: Series | None, excursion: Symptom, seen: Sequence[Symptom]
) -> tuple[Health, list[Symptom]]:
    """Weigh the KL that the past does not explain: others lower the bar, a reward that gains raises it."""
    excess = _excess(kl)
    wobbles = gained_wobbles(reward, excursion.calm_step)
    confirming = [
        one
        for one in seen
        if (one.strong or (wobbles < SURE_WOBBLES and one.group in (REWARD, "gradients", "witness")))
        and one.points <= excursion.points + LASTING_POINTS
    ]
    paid = min(max(wobbles / SURE_WOBBLES, 0.0), KL_PAID)
    strength = {one.group: 1 + one.strong for one in sorted(confirming, key=lambda one: one.strong)}
    bar = KL_UNPAID / FACTOR ** sum(strength.values()) + paid
    if excess > bar:
        return Health.TRIPPED, [excursion, *confirming]
    return Health.WATCH if excess > bar / FACTOR else Health.HEALTHY, [excursion]


def _not_finite(detector: Detector, step: int) -> list[Symptom]:
    return [
        Symptom("not finite", f"{name} was not finite for {count} points in a row", since, since, count)
        for name in NOT_FINITE
        for count, since in [detector.not_finite.get(name, (0, 0))]
        if count >= NOT_FINITE_POINTS and (name != "grad_norm" or step - since > OVERFLOW_STEPS + 1)
    ]


def _excess(kl: Series) -> float:
    """Nats per token that the past does not explain."""
    level = math.exp(kl.sustained(1.0))
    return level - math.exp(explained(kl, 1.0))


def _onset(found: Sequence[Symptom], reward: Series | None) -> int:
    """Return the first step that the excursion may have touched.

    A run that learnt was well meanwhile and is never dated to its start: it was well until its reward last stood
    at its best, or, where the KL had left its past by then, until the reward had surely gained.
    """
    onset = min(symptom.onset_step for symptom in found)
    if onset > 1:
        return onset
    kl_onset = min((symptom.onset_step for symptom in found if symptom.group == KL), default=math.inf)
    best = best_until(reward)
    return max(1, best if best <= kl_onset else learnt_until(reward))


def _over(kl: Series | None, limit: float | None) -> list[Symptom]:
    """The excursion over the user's own limit."""
    if kl is None or kl.start is None or limit is None:
        return []
    level, begin = math.exp(kl.sustained(1.0)), math.exp(kl.start)
    if level <= begin + limit:
        return []
    text = f"KL {level:.3g}, over the limit of {limit:g} above its start of {begin:.3g}"
    return [_since_calm(kl, math.log(level / (begin + limit / 4)), text)]


def _absurd(series: Mapping[str, Series]) -> list[Symptom]:
    """What needs no past: a KL that nothing is worth, or all completions cut and all groups alike from the start.

    Of KL less is too much where all is cut or all groups are alike, and nothing was gained by it.
    """
    alike: list[Series] = []
    if gained_wobbles(series.get(REWARD), 0) < SURE_WOBBLES:
        most = 2 * math.log(FACTOR)
        there = [series[name] for name in (CLIPPED, NO_VARIANCE) if name in series]
        alike = [one for one in there if one.sustained(1.0) >= most]
        mute = [one for one in there if one.points >= 3 * LASTING_POINTS and min(one.levels) >= most / 2]
        if len(mute) == 2:
            return [Symptom("mute", "all completions are cut and all groups alike, since the start", 0, 0, 0)]
    kl = series.get(KL)
    level = 0.0 if kl is None else math.exp(kl.sustained(1.0))
    if kl is None or level <= KL_BROKEN / FACTOR ** len(alike):
        return []
    return [_since_calm(kl, math.log(FACTOR), f"KL {level:.3g} nats per token, more than any gain is worth")]


def _since_calm(kl: Series, least: float, text: str) -> Symptom:
    shift = dated(kl, 1.0, max(kl.sustained(1.0) - explained(kl, 1.0), least))
    return Symptom("kl", text, shift.onset_step, shift.calm_step, shift.points)


def _broken(reward: Series | None, found: Sequence[Symptom]) -> bool:
    """Whether a reward that has fallen and does not recover, or gradients, tell it whatever the KL.

    Another signal must have left its past with them, or all that was learnt be lost for long.
    """
    lead = next((one for one in found if one.group in (REWARD, "gradients")), None)
    if lead is None:
        return False
    beside = [one for one in found if one.group != lead.group and one.points <= lead.points + LASTING_POINTS]
    groups = {one.group for one in beside}
    if lead.group != REWARD or reward is None or reward.start is None:
        return len(groups) >= 2
    if gained_wobbles(reward, lead.lowest_step) >= SURE_WOBBLES:
        return False
    if lead.points >= 3 * LASTING_POINTS and around(reward, lead.points)[1] <= reward.start + reward.wobble:
        return True
    lasting = lead.points >= LASTING_POINTS
    return len(groups) >= 2 or any(one.strong or lasting for one in beside)
