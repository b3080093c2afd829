"""The detector and the pitfalls never raise, whatever a log holds, and what is stored of them is all they know."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_orch.checkpoint.store.codec import from_json, to_json
from grpo_orch.policies.detect.divergence import Detector, Health, Point, follow, trip_at
from grpo_orch.policies.detect.pitfalls import Pitfalls, find_pitfalls

EXAMPLES = int(os.environ.get("EXAMPLES", "150"))
NAMES = (
    *("x", "kl", "reward", "loss", "grad_norm", "entropy", "kl_sequence", "witness/right", "eval_reward"),
    *("completions/mean_length", "completions/clipped_ratio", "frac_reward_zero_std"),
    *(
        "sampling/sampling_logp_difference/mean",
        "step_time",
        "orch/wait_s",
        "orch/prompts_refused",
        "orch/prompts_refused_row",
    ),
)
# What logs hold besides ordinary numbers: fractions that five digits cannot store, numbers near the limits of
# floats, integers beyond 2^53, booleans, nulls.
VALUES = st.one_of(
    st.none(),
    st.floats(),
    st.floats(0, 1),
    st.integers(-(10**18), 10**18),
    st.sampled_from([0.0, -0.0, 2 / 3, 1 / 6, 5 / 7, 1e-320, 1e308, -1e308, True]),
)


def column(draw: st.DrawFn, points: int) -> list[float | None]:
    """A series: constant, held for some points, alternating, one step, a ramp, or a repeated pattern."""
    match draw(st.sampled_from(["constant", "held", "alternating", "step", "ramp", "pattern"])):
        case "constant":
            return [draw(VALUES)] * points
        case "held":
            held = draw(st.integers(2, 12))
            values = [draw(VALUES) for _ in range(points // held + 1)]
            return [values[at // held] for at in range(points)]
        case "alternating":
            both = draw(VALUES), draw(VALUES)
            return [both[at % 2] for at in range(points)]
        case "step":
            before, after, change = draw(VALUES), draw(VALUES), draw(st.integers(0, points))
            return [before if at < change else after for at in range(points)]
        case "ramp":
            start, slope = draw(st.floats(-1e6, 1e6)), draw(st.floats(-1, 1))
            return [start + slope * at for at in range(points)]
    pattern = draw(st.lists(VALUES, min_size=1, max_size=30))
    return [pattern[(at * at + at // 3) % len(pattern)] for at in range(points)]


@st.composite
def logs(draw: st.DrawFn) -> list[Point]:
    points = draw(st.one_of(st.integers(1, 40), st.integers(40, 260)))
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=8))
    columns = {name: column(draw, points) for name in names}
    logged_every = {name: draw(st.integers(1, 4)) for name in names}
    first, gap = draw(st.sampled_from([0, 1, -5, 10**9])), draw(st.sampled_from([1, 5, 0, -1, 10**12]))
    return [
        Point(first + at * gap, {name: columns[name][at] for name in names if at % logged_every[name] == 0})
        for at in range(points)
    ]


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(log=logs(), limit=st.sampled_from([None, 0.1, 5.0]))
def test_no_log_makes_them_raise_and_a_store_in_between_changes_nothing(
    log: list[Point], limit: float | None
) -> None:
    detector = straight = stored = Detector()
    pitfalls = noted = kept = Pitfalls()
    for point in log:
        detector = follow(
            detector, point, limit
        )  # a foreign log has integers and booleans, our store floats alone
        pitfalls, _ = find_pitfalls(pitfalls, point)
        floats = {name: None if value is None else float(value) for name, value in point.values.items()}
        row = Point(point.step, floats)
        straight, stored = follow(straight, row, limit), follow(stored, row, limit)
        stored = from_json(to_json(stored), Detector, "stored")
        noted, found = find_pitfalls(noted, row)
        kept, again = find_pitfalls(from_json(to_json(kept), Pitfalls, "stored"), row)
        assert (stored, kept, again) == (straight, noted, found)
    verdict = detector.verdict
    assert verdict.onset_step is None or 1 <= verdict.onset_step <= max(1, verdict.step)
    assert (verdict.health is Health.TRIPPED) == (verdict.tripped_step is not None)
    assert bool(verdict.evidence) == (verdict.health is not Health.HEALTHY)
    assert len(to_json(noted)) < 6_000
    trip_at(detector, log[-1].step, 0, "stopped")


def test_no_constant_fraction_makes_the_detector_raise() -> None:
    """Levels are stored with five digits, so most fractions differ from their own level."""
    for numerator, denominator in ((a, b) for b in range(2, 40) for a in range(1, b)):
        detector = Detector()
        for step in range(1, 30):
            detector = follow(detector, Point(step, {"reward": numerator / denominator, "kl": 0.001}))
