"""What wastes a run's steps or machines and is no divergence: told once, with what to do about it.

Pure and incremental, as `policies.detect.divergence` is. Each pitfall is judged over a window of points, and told
again only after it was gone, or AGAIN_STEPS later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from policies.detect.divergence import Point
from policies.detect.signals import HUGE
from policies.detect.symptoms import CLIPPED, NO_VARIANCE, SAMPLING

WINDOW_POINTS = 16
OUTLIERS = 2  # so many points of the window may be otherwise
AGAIN_STEPS = 200
# Four in a row all rise by chance once in 24 times.
EVALUATIONS = 4
EVAL_REWARD, REWARD = "eval_reward", "reward"
# Optimizer steps between the policy that sampled and the one that is trained, and by how much each may move a
# token's log-probability. In recorded runs that learn, one update moves it by at most 0.07 in nine of ten steps,
# eight by 0.47; in one that breaks, one update moves it by 0.14 in the median (docs/detection.md).
STALENESS, MOVED_A_STEP = "orch/staleness", 0.05
WAIT_S, STEP_TIME = "orch/wait_s", "step_time"
PROMPTS_REFUSED = "orch/prompts_refused"
REFUSED_ROW, REFUSED_TOKENS, REFUSED_LIMIT = "orch/refused_row", "orch/refused_tokens", "orch/refused_limit_tokens"
# Steps in a row without any reward, after which the trainer stops: before the guard takes it for a divergence.
UNREWARDED_MAX = 4
NO_REWARD = "orch/nonfinite/reward"  # in the row of a step whose reward is no number
WAITING_SHARE = 0.25  # of the time of its steps: a fourth node for three would pay


@dataclass(frozen=True, slots=True)
class Pitfall:
    """What is seen at `step`, in numbers, and what to do about it."""

    kind: str
    step: int
    text: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A held-out reward, and the median of the training rewards since the one before."""

    held_out: float
    training: float


@dataclass(frozen=True, slots=True)
class Pitfalls:
    """What must be remembered between two points: windows by name, when each was told. JSON types only."""

    step: int = 0
    windows: dict[str, tuple[float, ...]] = field(default_factory=dict)
    evaluations: tuple[Evaluation, ...] = ()
    rewards: tuple[float, ...] = ()  # since the last evaluation
    said: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _HighSignal:
    """A share or a difference that is a pitfall while it stays at or above `least`."""

    kind: str
    name: str
    least: float
    text: str


_HIGH = (
    _HighSignal(
        "no_signal",
        NO_VARIANCE,
        0.9,
        "{:.0%} of the groups have the same reward for all their completions, and these teach nothing: "
        "take harder prompts where rewards are high and easier ones where they are low, "
        "sample at a higher temperature, or grade more finely",
    ),
    # bf16 kernels of two engines differ by 0.01 to 0.05 on the same weights, in fp32 they agree to six digits.
    _HighSignal(
        "stale_sampling",
        SAMPLING,
        0.3,
        "the trainer and the rollout nodes differ by {:.2g} in the log-probability of a token, beyond what the "
        "run's staleness explains: the nodes hold other weights than they should, or compute otherwise: see in "
        "`grpo-orch members ls` which policies they hold, give rollout.vllm.dtype the trainer's dtype "
        "(grpo.bf16, grpo.fp16), and leave out "
        "rollout.vllm.quantization and kv-cache-dtype",
    ),
    _HighSignal(
        "completions_cut",
        CLIPPED,
        0.5,
        "{:.0%} of the completions are cut at the longest allowed and graded without their end: "
        "raise max_completion_length",
    ),
)


def find_pitfalls(state: Pitfalls, point: Point) -> tuple[Pitfalls, tuple[Pitfall, ...]]:
    """Return the state after one more logged point, and what there is to say now. An earlier step says nothing."""
    if point.step <= state.step:
        return state, ()
    values = {
        name: min(max(value, -HUGE), HUGE)
        for name, value in point.values.items()
        if value is not None and math.isfinite(value)
    }
    state = _remember(state, values, point.step)
    said, new = dict(state.said), list[Pitfall]()
    for found in _found(state):
        if found.there and (found.kind not in said or point.step - said[found.kind] >= AGAIN_STEPS):
            said[found.kind] = point.step
            new.append(Pitfall(found.kind, point.step, found.text))
        elif found.gone:
            said.pop(found.kind, None)
    return Pitfalls(point.step, state.windows, state.evaluations, state.rewards, said), tuple(new)


def _remember(state: Pitfalls, values: Mapping[str, float], step: int) -> Pitfalls:
    windows = dict(state.windows)
    for name in [high.name for high in _HIGH]:
        if name in values:
            value = values[name]
            if name == SAMPLING:
                value = max(0.0, value - MOVED_A_STEP * max(0.0, values.get(STALENESS, 0.0)))
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
        # The one is a sum over the steps of the point, the other their mean.
        took_s = values[STEP_TIME] * (step - state.step)
        windows[WAIT_S] = (*windows.get(WAIT_S, ()), values[WAIT_S])[-WINDOW_POINTS:]
        windows[STEP_TIME] = (*windows.get(STEP_TIME, ()), took_s)[-WINDOW_POINTS:]
    rewards = (*state.rewards, values[REWARD])[-WINDOW_POINTS:] if REWARD in values else state.rewards
    evaluations = state.evaluations
    if EVAL_REWARD in values and rewards:
        evaluations = (*evaluations, Evaluation(values[EVAL_REWARD], median(rewards)))[-EVALUATIONS:]
        rewards = ()
    return Pitfalls(step, windows, evaluations, rewards, state.said)


@dataclass(frozen=True, slots=True)
class _Found:
    """One kind: whether it is there, whether it is gone, and what to say. In between it is neither."""

    kind: str
    there: bool
    gone: bool
    text: str


def _found(state: Pitfalls) -> Iterator[_Found]:
    for high in _HIGH:
        window = state.windows.get(high.name, ())
        count = sum(value >= high.least for value in window)
        there, gone = count >= WINDOW_POINTS - OUTLIERS, 2 * count < len(window)
        yield _Found(high.kind, there, gone, high.text.format(median(window) if window else 0.0))
    yield _unrewarded(state.windows.get(NO_REWARD, ()))
    yield _refused(state.windows)
    yield _waiting(state.windows.get(WAIT_S, ()), sum(state.windows.get(STEP_TIME, ())))
    yield _overfits(state.evaluations)


def _unrewarded(newest: tuple[float, ...]) -> _Found:
    """Whether no completion of the newest point had a reward. One point is enough: it teaches nothing for sure."""
    text = (
        "no completion had a reward: every reward function returned None or NaN for all of them, and such a step "
        f"teaches nothing; after {UNREWARDED_MAX} in a row the run stops: have one function return a number for "
        "every completion"
    )
    return _Found("no_reward", newest == (1.0,), newest == (0.0,), text)


def _refused(windows: Mapping[str, tuple[float, ...]]) -> _Found:
    counts = windows.get(PROMPTS_REFUSED, ())
    row, tokens, limit = (windows.get(name, ()) for name in (REFUSED_ROW, REFUSED_TOKENS, REFUSED_LIMIT))
    which = f"row {row[0]:.0f} of the dataset" if row else "one whose row is not known"
    length = f", {tokens[0]:.0f} tokens" if tokens else ""
    takes = f" where a sequence may have {limit[0]:.0f}" if limit else ""
    text = (
        f"no rollout node took {sum(counts):.0f} of the prompts of the last {len(counts)} points, and they were "
        f"left out; the last is {which}{length}{takes}: shorten or drop such prompts, or raise "
        "rollout.vllm.max-model-len; policies.on_bad_prompt: fail ends the run instead"
    )
    return _Found("prompts_refused", bool(counts and counts[-1]), not any(counts), text)


def _waiting(waited_s: tuple[float, ...], took_s: float) -> _Found:
    share = min(sum(waited_s) / took_s, 1.0) if took_s > 0.0 else 0.0
    there = len(waited_s) == WINDOW_POINTS and share >= WAITING_SHARE
    text = (
        f"in {share:.0%} of the time of the last {WINDOW_POINTS} points no node could serve, and the trainer "
        "stood idle: take more rollout nodes, or ones that are lost more rarely"
    )
    return _Found("waiting", there, share < WAITING_SHARE / 2, text)


def _overfits(evaluations: tuple[Evaluation, ...]) -> _Found:
    """Whether the training reward rose from each evaluation to the next, and the held-out one to no new height."""
    kind, half = "overfitting", EVALUATIONS // 2
    if len(evaluations) < EVALUATIONS:
        return _Found(kind, False, False, "")
    training, held_out = [one.training for one in evaluations], [one.held_out for one in evaluations]
    rises = all(before < after for before, after in pairwise(training))
    there = rises and max(held_out[half:]) <= max(held_out[:half])
    text = (
        f"over {EVALUATIONS} evaluations the reward rose from {training[0]:.3g} to {training[-1]:.3g} and the "
        f"held-out one went from {held_out[0]:.3g} to {held_out[-1]:.3g}: read completions for what the reward is "
        "tricked with, take more prompts, or stop here"
    )
    return _Found(kind, there, not there, text)
