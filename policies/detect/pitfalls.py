"""Detect problems that waste steps or machines without a divergence, and suggest a fix.

Pure and incremental, as `policies.detect.divergence`. Each pitfall is judged over a window of points, and reported
again only after it was gone, or after REPEAT_STEPS.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from grpo_orch.policies.detect.divergence import Point
from grpo_orch.policies.detect.signals import HUGE
from grpo_orch.policies.detect.symptoms import CLIPPED, NO_VARIANCE, SAMPLING

WINDOW_POINTS = 16
OUTLIERS = 2  # points of the window that may be below the threshold
REPEAT_STEPS = 200
# Four random values are in rising order once in 24 times.
EVALUATIONS = 4
EVAL_REWARD, REWARD = "eval_reward", "reward"
# Optimizer steps between the sampling and the trained policy, and the change of a token's log-probability that
# each may cause. In recorded runs that learn, an update changes it by at most 0.07 in nine of ten steps, eight
# updates by 0.47; in a run that diverges, an update changes it by 0.14 in the median (docs/detection.md).
STALENESS, MOVED_PER_STEP = "orch/staleness", 0.05
WAIT_S, STEP_TIME = "orch/wait_s", "step_time"
PROMPTS_REFUSED = "orch/prompts_refused"
REFUSED_ROW, REFUSED_TOKENS, REFUSED_LIMIT = "orch/refused_row", "orch/refused_tokens", "orch/refused_limit_tokens"
# Consecutive steps without any reward after which the trainer stops, before the detector reports a divergence.
UNREWARDED_MAX = 4
NO_REWARD = "orch/nonfinite/reward"  # logged for a step whose reward is not finite
WAITING_SHARE = 0.25  # of the step time: enough to pay for a fourth node of three


@dataclass(frozen=True, slots=True)
class Pitfall:
    """A problem found at `step`, in numbers, and how to fix it."""

    kind: str
    step: int
    text: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A held-out reward, and the median training reward since the previous evaluation."""

    held_out: float
    training: float


@dataclass(frozen=True, slots=True)
class Pitfalls:
    """The state between two points: windows by metric, and by pitfall the step of its last report (`reported`).

    JSON types only.
    """

    step: int = 0
    windows: dict[str, tuple[float, ...]] = field(default_factory=dict)
    evaluations: tuple[Evaluation, ...] = ()
    rewards: tuple[float, ...] = ()  # since the last evaluation
    reported: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _HighSignal:
    """A metric that is a pitfall while it stays at or above `least`."""

    kind: str
    name: str
    least: float
    text: str


_HIGH = (
    _HighSignal(
        "no_signal",
        NO_VARIANCE,
        0.9,
        "{:.0%} of the groups have equal rewards for all completions, so the model learns nothing from them: "
        "use harder prompts if rewards are high and easier ones if they are low, "
        "sample at a higher temperature, or use a finer reward",
    ),
    # On the same weights, bf16 kernels of two engines differ by 0.01 to 0.05; fp32 kernels agree to six digits.
    _HighSignal(
        "stale_sampling",
        SAMPLING,
        0.3,
        "the trainer and the rollout nodes differ by {:.2g} in the log-probability of a token, more than "
        "the run's staleness explains. The nodes hold wrong weights or compute differently: check their "
        "policies with `grpo-orch members ls`, set rollout.vllm.dtype to the trainer's dtype (grpo.bf16, "
        "grpo.fp16), and remove rollout.vllm.quantization and kv-cache-dtype",
    ),
    _HighSignal(
        "completions_cut",
        CLIPPED,
        0.5,
        "{:.0%} of the completions are cut at the maximum length and graded without their end: "
        "raise max_completion_length",
    ),
)


def find_pitfalls(state: Pitfalls, point: Point) -> tuple[Pitfalls, tuple[Pitfall, ...]]:
    """Return the state after the next logged point, and the pitfalls to report now. Earlier steps are ignored."""
    if point.step <= state.step:
        return state, ()
    values = {
        name: min(max(value, -HUGE), HUGE)
        for name, value in point.values.items()
        if value is not None and math.isfinite(value)
    }
    state = _remember(state, values, point.step)
    reported_at, new = dict(state.reported), list[Pitfall]()
    for check in _checks(state):
        last_step = reported_at.get(check.kind)
        if check.is_present and (last_step is None or point.step - last_step >= REPEAT_STEPS):
            reported_at[check.kind] = point.step
            new.append(Pitfall(check.kind, point.step, check.text))
        elif check.is_gone:
            reported_at.pop(check.kind, None)
    return Pitfalls(point.step, state.windows, state.evaluations, state.rewards, reported_at), tuple(new)


def _remember(state: Pitfalls, values: Mapping[str, float], step: int) -> Pitfalls:
    windows = dict(state.windows)
    for name in [high.name for high in _HIGH]:
        if name in values:
            value = values[name]
            if name == SAMPLING:
                value = max(0.0, value - MOVED_PER_STEP * max(0.0, values.get(STALENESS, 0.0)))
            windows[name] = (*windows.get(name, ()), value)[-WINDOW_POINTS:]
    windows[PROMPTS_REFUSED] = (*windows.get(PROMPTS_REFUSED, ()), values.get(PROMPTS_REFUSED, 0.0))[
        -WINDOW_POINTS:
    ]
    if NO_REWARD in values or REWARD in values:
        windows[NO_REWARD] = (float(REWARD not in values),)
    if PROMPTS_REFUSED in values:
        for name in (REFUSED_ROW, REFUSED_TOKENS, REFUSED_LIMIT):
            windows[name] = (values[name],) if name in values else ()
    if WAIT_S in values and STEP_TIME in values and state.step:
        # WAIT_S is a sum over the steps of the point, STEP_TIME their mean.
        took_s = values[STEP_TIME] * (step - state.step)
        windows[WAIT_S] = (*windows.get(WAIT_S, ()), values[WAIT_S])[-WINDOW_POINTS:]
        windows[STEP_TIME] = (*windows.get(STEP_TIME, ()), took_s)[-WINDOW_POINTS:]
    rewards = (*state.rewards, values[REWARD])[-WINDOW_POINTS:] if REWARD in values else state.rewards
    evaluations = state.evaluations
    if EVAL_REWARD in values and rewards:
        evaluations = (*evaluations, Evaluation(values[EVAL_REWARD], median(rewards)))[-EVALUATIONS:]
        rewards = ()
    return Pitfalls(step, windows, evaluations, rewards, state.reported)


@dataclass(frozen=True, slots=True)
class _Check:
    """The result for a kind of pitfall. In a transition it is neither present nor gone."""

    kind: str
    is_present: bool
    is_gone: bool
    text: str


def _checks(state: Pitfalls) -> Iterator[_Check]:
    for high in _HIGH:
        window = state.windows.get(high.name, ())
        count = sum(value >= high.least for value in window)
        is_present, is_gone = count >= WINDOW_POINTS - OUTLIERS, 2 * count < len(window)
        yield _Check(high.kind, is_present, is_gone, high.text.format(median(window) if window else 0.0))
    yield _unrewarded(state.windows.get(NO_REWARD, ()))
    yield _refused(state.windows)
    yield _waiting(state.windows.get(WAIT_S, ()), sum(state.windows.get(STEP_TIME, ())))
    yield _overfits(state.evaluations)


def _unrewarded(newest: tuple[float, ...]) -> _Check:
    """Check whether the newest point has any reward. A single point without rewards is reported."""
    text = (
        "no completion had a reward: every reward function returned None or NaN for all of them, so the model "
        f"learns nothing from this step, and the run stops after {UNREWARDED_MAX} such steps in a row. Make one "
        "function return a number for every completion"
    )
    return _Check("no_reward", newest == (1.0,), newest == (0.0,), text)


def _refused(windows: Mapping[str, tuple[float, ...]]) -> _Check:
    counts = windows.get(PROMPTS_REFUSED, ())
    row, tokens, limit = (windows.get(name, ()) for name in (REFUSED_ROW, REFUSED_TOKENS, REFUSED_LIMIT))
    which = f"row {row[0]:.0f} of the dataset" if row else "in an unknown row"
    length = f", {tokens[0]:.0f} tokens" if tokens else ""
    maximum = f" (a sequence may have {limit[0]:.0f})" if limit else ""
    text = (
        f"all rollout nodes rejected {sum(counts):.0f} prompts in the last {len(counts)} points, and these were "
        f"skipped; the last is {which}{length}{maximum}: shorten or remove such prompts, or raise "
        "rollout.vllm.max-model-len. To stop the run instead, set policies.on_bad_prompt: fail"
    )
    return _Check("prompts_refused", bool(counts and counts[-1]), not any(counts), text)


def _waiting(waited_s: tuple[float, ...], took_s: float) -> _Check:
    share = min(sum(waited_s) / took_s, 1.0) if took_s > 0.0 else 0.0
    is_present = len(waited_s) == WINDOW_POINTS and share >= WAITING_SHARE
    text = (
        f"no node could serve for {share:.0%} of the time of the last {WINDOW_POINTS} points, and the trainer "
        "was idle: use more rollout nodes, or nodes that are preempted less often"
    )
    return _Check("waiting", is_present, share < WAITING_SHARE / 2, text)


def _overfits(evaluations: tuple[Evaluation, ...]) -> _Check:
    """Check whether the training reward rose at every evaluation and the held-out reward had no new maximum."""
    kind, half = "overfitting", EVALUATIONS // 2
    if len(evaluations) < EVALUATIONS:
        return _Check(kind, False, False, "")
    training = [evaluation.training for evaluation in evaluations]
    held_out = [evaluation.held_out for evaluation in evaluations]
    rises = all(before < after for before, after in pairwise(training))
    is_present = rises and max(held_out[half:]) <= max(held_out[:half])
    text = (
        f"over {EVALUATIONS} evaluations the reward rose from {training[0]:.3g} to {training[-1]:.3g} while the "
        f"held-out reward went from {held_out[0]:.3g} to {held_out[-1]:.3g}: check for reward hacking, use more "
        "prompts, or stop here"
    )
    return _Check(kind, is_present, not is_present, text)
