"""What a GRPO run would log: its course, the noise on it, and the rows that TRL makes of both.

A course is the truth without noise, one value per step. The families beside this bend courses; here
they become points. The policy, its reward, its gradients and its lengths follow one course, each with a scale and
a noise of its own, so that what belongs together moves together and nothing can be told from one run's units.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_orch.policies.detect.divergence import Point

Floats = NDArray[np.float64]
Random = np.random.Generator

LAST_OF_WINDOW = ("grad_norm", "learning_rate", "num_tokens", "eval_reward")  # the others are means over it
WARM_UP_STEPS = 20  # of the learning rate
EVAL_EVERY_STEPS = 50
WITNESS = "witness/right"
WITNESSED = 64  # completions of a step
NOISES = ("gaussian", "log-normal", "student")


@dataclass(frozen=True, slots=True)
class Setting:
    """From which ranges the runs of one set are drawn.

    Args:
        kl_sigma: of the noise on KL, relative.
        kinship: how alike the noise of neighbouring steps is, 0 to 1.
        freedom: degrees of freedom of the heavy-tailed noise; fewer are wilder.
        completions: over which the reward of a step is a mean.
        grad_sigma: of the noise on the gradient's norm, relative.
        spike: how many times its usual value KL has at a spike.
    """

    seed: int
    kl_sigma: tuple[float, float] = (0.03, 0.4)
    kinship: tuple[float, float] = (0.0, 0.85)
    freedom: float = 4.0
    completions: tuple[int, int] = (48, 256)
    grad_sigma: tuple[float, float] = (0.1, 0.45)
    spike: tuple[float, float] = (10.0, 1000.0)


@dataclass
class Course:
    """A run without its noise. NaN: the step logged one. `kl` in nats, `reward` and `length` as shares of what is
    possible, `grad_norm` and `logp` (sampler and trainer disagree) relative to the run's own level.

    Args:
        absent: metrics that the run does not log.
        only: the metrics that it does log; None: all others.
        lost: how likely it is, at each step, that some metric is NaN.
        holes: how likely it is that a row lacks a metric.
        kl_name: what its KL is logged as.
        around: sigma in nats of the noise of a signed estimator, which is around the KL and not relative to it.
        overflows: how likely it is, at each step, that the KL that is logged is infinite and nothing else is.
        worth: the least reward, and from there to the most.
        cut: share of completions that are cut off, where it does not follow from their length.
        alike: share of groups whose rewards are all the same, where it does not follow from the reward.
        witness: the score of the true task as a share of what is possible, where it is logged beside the reward.
        one_prompt: the answers of a step that are all to one prompt, each right or wrong, and how far its prompts
            are apart in difficulty, in sigmas of log odds.
    """

    kl: Floats
    reward: Floats
    grad_norm: Floats
    entropy: Floats
    length: Floats
    rate: Floats
    logp: Floats
    absent: set[str] = field(default_factory=set)
    lost: Floats | None = None
    noisiness: float = 1.0
    only: frozenset[str] | None = None
    holes: float = 0.0
    kl_name: str = "kl"
    around: Floats | None = None
    overflows: Floats | None = None
    worth: tuple[float, float] | None = None
    cut: Floats | None = None
    alike: Floats | None = None
    witness: Floats | None = None
    one_prompt: tuple[int, float] | None = None

    @property
    def steps(self) -> int:
        return len(self.kl)


def uniform(rng: Random, between: tuple[float, float]) -> float:
    return float(rng.uniform(*between))


def magnitude(rng: Random, between: tuple[float, float]) -> float:
    """A number of that range; all powers of ten are equally likely."""
    return float(np.exp(rng.uniform(*np.log(between))))


def ramp(steps: int, after: int, over: float) -> Floats:
    """0 up to and with the step `after`, then rising to 1 in so many steps, and 1."""
    return np.clip((np.arange(1, steps + 1) - after) / over, 0.0, 1.0)


def sigmoid(steps: int, middle: float, width: float) -> Floats:
    grown: Floats = 1 / (1 + np.exp(-np.clip((np.arange(1, steps + 1) - middle) / width, -50, 50)))
    return grown


def healthy(rng: Random, kl: Floats) -> Course:
    """A run that learns, at a pace and from a start of its own, with this KL."""
    steps = len(kl)
    at = np.arange(1, steps + 1)
    low, high = uniform(rng, (0.05, 0.4)), uniform(rng, (0.5, 0.95))
    learnt = sigmoid(steps, uniform(rng, (0.1, 0.6)) * steps, uniform(rng, (0.04, 0.2)) * steps)
    entropy = magnitude(rng, (0.1, 1.5)) * (1 + (uniform(rng, (0.25, 1.2)) - 1) * (1 - np.exp(-4 * at / steps)))
    length = uniform(rng, (0.08, 0.4)) * (1 + (uniform(rng, (0.7, 1.6)) - 1) * learnt)
    rate = np.minimum(1.0, at / WARM_UP_STEPS)
    if rng.random() < 0.6:
        rate = rate * (0.55 + 0.45 * np.cos(np.pi * at / steps))
    drift = np.exp(np.log(uniform(rng, (0.4, 2.0))) * at / steps)
    return Course(kl.copy(), low + (high - low) * learnt, drift, entropy, length, rate, np.ones(steps))


def akin(drawn: Floats, rho: float) -> Floats:
    """The same draws, each like the one before it to this degree."""
    keep = (1 - rho * rho) ** 0.5
    return np.fromiter(accumulate(drawn, lambda last, new: rho * last + keep * new), float, len(drawn))


def noise(rng: Random, steps: int, sigma: float, setting: Setting, kind: str | None = None) -> Floats:
    """Factors around 1, each like the one before it to a degree."""
    kind = kind or str(rng.choice(NOISES))
    rho = uniform(rng, setting.kinship)
    drawn = rng.normal(size=steps)
    if kind == "student":
        free = setting.freedom
        drawn = np.clip(rng.standard_t(free, size=steps) / np.sqrt(free / (free - 2)), -8, 8)
    alike = akin(drawn, rho)
    factors: Floats = (
        np.maximum(0.02, 1 + min(sigma, 0.3) * alike) if kind == "gaussian" else np.exp(sigma * alike)
    )
    return factors


def log(course: Course, rng: Random, setting: Setting, logging_steps: int) -> tuple[Point, ...]:
    """The course with its noise, as TRL logs it every so many steps."""
    metrics = measured(course, rng, setting)
    if course.one_prompt is not None:
        metrics |= _of_one_prompt(course, rng, *course.one_prompt, metrics)
    if course.lost is not None:
        for name in ("kl", "reward", "grad_norm", "entropy"):
            metrics[name] = np.where(rng.random(course.steps) < course.lost, np.nan, metrics[name])
    metrics = _by_itself(metrics, course, rng)
    unlogged = set() if course.only is None else metrics.keys() - course.only
    told = points(metrics, logging_steps, course.absent | unlogged)
    return told if course.holes == 0 else tuple(_with_holes(point, rng, course.holes) for point in told)


def _of_one_prompt(
    course: Course, rng: Random, answers: int, apart: float, metrics: dict[str, Floats]
) -> dict[str, Floats]:
    """What follows from which prompt a step had: a reward that is 0 or 1 more often than not, answers that are
    longer and less sure where it is hard."""
    hard = apart * rng.normal(size=course.steps)
    odds = np.log(np.clip(course.reward, 1e-4, 1 - 1e-4) / np.clip(1 - course.reward, 1e-4, 1))
    # The mean of a logistic of normals is that of odds so much nearer to even.
    right = rng.binomial(answers, 1 / (1 + np.exp(hard - odds * np.sqrt(1 + apart**2 / 3)))) / answers
    return {
        "rewards/correct/mean": right,
        "reward": right,
        "reward_std": np.sqrt(right * (1 - right)),
        "frac_reward_zero_std": (right * (1 - right) == 0).astype(float),
        "entropy": metrics["entropy"] * np.exp(0.15 * hard),
        "completions/mean_length": metrics["completions/mean_length"] * np.exp(0.1 * hard),
    }


def _by_itself(metrics: dict[str, Floats], course: Course, rng: Random) -> dict[str, Floats]:
    """The metrics with what the course says of them beyond what follows from the rest."""
    if course.around is not None:
        metrics["kl"] = metrics["kl"] + course.around * rng.normal(size=course.steps)
    if course.overflows is not None:
        metrics["kl"] = np.where(rng.random(course.steps) < course.overflows, np.inf, metrics["kl"])
    if course.cut is not None:
        metrics["completions/clipped_ratio"] = course.cut
    if course.alike is not None:  # where all are, the reward is what it is, and nothing is learnt
        metrics["frac_reward_zero_std"] = course.alike
        metrics["rewards/correct/mean"] = np.where(
            course.alike < 1, metrics["rewards/correct/mean"], course.reward
        )
        metrics["reward"] = np.where(course.alike < 1, metrics["reward"], course.reward)
        metrics["reward_std"] = np.where(course.alike < 1, metrics["reward_std"], 0.0)
    if course.worth is not None:
        least, span = course.worth
        metrics["reward"] = least + span * metrics["rewards/correct/mean"]
        metrics["reward_std"] = span * np.minimum(metrics["reward_std"], 0.5)
    if course.witness is not None:
        spread = np.sqrt(np.maximum(course.witness * (1 - course.witness), 1e-4))
        metrics[WITNESS] = course.witness + spread / WITNESSED**0.5 * rng.normal(size=course.steps)
    return {course.kl_name if name == "kl" else name: values for name, values in metrics.items()}


def _with_holes(point: Point, rng: Random, holes: float) -> Point:
    return replace(point, values={name: value for name, value in point.values.items() if rng.random() >= holes})


def measured(course: Course, rng: Random, setting: Setting) -> dict[str, Floats]:
    """Every metric at every step."""
    steps = course.steps
    loud = course.noisiness
    kl = course.kl * noise(rng, steps, loud * uniform(rng, setting.kl_sigma), setting)
    completions = rng.integers(*setting.completions)
    spread = np.sqrt(np.maximum(course.reward * (1 - course.reward), 1e-4))
    rewarded = np.clip(course.reward + loud * spread / completions**0.5 * rng.normal(size=steps), 0, 1)
    worth = float(rng.choice([1.0, 1.0, 2.0, 10.0]))
    least = worth * float(rng.choice([0.0, 0.0, -1.0, -0.5]))
    unsure = np.clip(2.2 * spread * noise(rng, steps, 0.15, setting, "gaussian") - 0.02, 0, 1)
    grad_norm = magnitude(rng, (0.05, 5.0)) * course.grad_norm
    grad_norm = grad_norm * noise(rng, steps, loud * uniform(rng, setting.grad_sigma), setting)
    entropy = course.entropy * noise(rng, steps, loud * uniform(rng, (0.02, 0.1)), setting)
    cap = float(rng.choice([256, 1024, 4096]))
    length = np.clip(course.length * noise(rng, steps, 0.06 * loud, setting, "log-normal"), 0, 1)
    logp = course.logp * magnitude(rng, (1e-3, 2e-2)) * noise(rng, steps, 0.1, setting)
    farthest = logp * magnitude(rng, (10, 60)) * noise(rng, steps, 0.4, setting, "student")
    clipped = np.clip(np.clip(course.length * 1.25 - 0.25, 0, 1) ** 2 + 0.02 * rng.normal(size=steps), 0, 1)
    beta = magnitude(rng, (1e-3, 0.1))
    gain = 1e-3 * rng.normal(size=steps)
    pace = magnitude(rng, (1e-7, 1e-5)) * course.rate
    metrics = {
        "loss": np.where(np.isnan(kl), np.nan if rng.random() < 0.5 else 0.0, beta * kl + gain),
        "grad_norm": grad_norm,
        "learning_rate": pace,
        "num_tokens": np.cumsum(np.nan_to_num(length) * cap * completions),
        "completions/mean_length": length * cap,
        "completions/max_length": np.minimum(cap, length * cap * 2.2),
        "completions/clipped_ratio": clipped,
        "reward": least + worth * rewarded,
        "rewards/correct/mean": rewarded,
        "reward_std": worth * unsure,
        "frac_reward_zero_std": np.clip(1 - 1.6 * unsure, 0, 1),
        "kl": kl,
        "entropy": entropy,
        "clip_ratio/region_mean": np.clip(2e-3 * course.grad_norm * rng.random(steps), 0, 1),
        "sampling/sampling_logp_difference/mean": logp,
        "sampling/sampling_logp_difference/max": farthest,
        "sampling/importance_sampling_ratio/mean": 1 + logp * rng.normal(size=steps),
        "step_time": 12 * noise(rng, steps, 0.1, setting, "student"),
        "eval_reward": np.where(np.arange(1, steps + 1) % EVAL_EVERY_STEPS, np.inf, rewarded),
    }
    if "kl" in course.absent:
        metrics["loss"] = gain
    return metrics


def points(metrics: dict[str, Floats], logging_steps: int, absent: Iterable[str] = ()) -> tuple[Point, ...]:
    """The rows that TRL logs of one value per step. NaN is left out of a mean; the mean of nothing is None."""
    steps = len(metrics["loss"]) // logging_steps * logging_steps
    columns: dict[str, list[float | None]] = {}
    for name, values in metrics.items():
        windows = values[:steps].reshape(-1, logging_steps)
        if name in LAST_OF_WINDOW:
            logged = windows[:, -1]
        else:
            there = ~np.isnan(windows)
            counts = there.sum(axis=1)
            sums = np.where(there, windows, 0.0).sum(axis=1)
            logged = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        columns[name] = [value if np.isfinite(value) else None for value in logged.tolist()]
    rows = range(steps // logging_steps)
    return tuple(Point((row + 1) * logging_steps, _row(columns, row, set(absent))) for row in rows)


def _row(columns: dict[str, list[float | None]], row: int, absent: set[str]) -> dict[str, Any]:
    """Evaluation is logged at its own steps alone; elsewhere its name is absent, not None."""
    return {
        name: values[row]
        for name, values in columns.items()
        if name not in absent and not (name == "eval_reward" and values[row] is None)
    }
