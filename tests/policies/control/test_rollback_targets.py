"""Whatever is judged and whenever: the store still has a checkpoint to go back to, and none that is much too old.

A run is simulated with the real retention and the real choice of a target, and beside it what it ever stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_orch.orchestrator.simulate.simulated_work import retain
from grpo_orch.policies.control.rollback import Target, choose_target, newest_before, target_before_step
from grpo_orch.policies.detect.divergence import Health, Verdict
from grpo_orch.policies.model.spec import CheckpointsSpec
from grpo_orch.policies.model.state import Rollback
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import Cause, PolicyVersion, RollbackStage
from tests.budget import examples


@dataclass
class Run:
    """A run as its store sees it. A checkpoint that was saved waits in the spool for its upload."""

    save_steps: int
    logging_steps: int
    spec: CheckpointsSpec
    step: int = 0
    watched_since: int | None = None
    forks: list[Fork] = field(default_factory=list)
    rollbacks: list[Rollback] = field(default_factory=list)
    spooled: list[tuple[PolicyVersion, Verdict]] = field(default_factory=list)
    listed: list[PolicyVersion] = field(default_factory=list)
    ever: set[PolicyVersion] = field(default_factory=set)  # what was ever listed

    @property
    def timeline(self) -> int:
        return len(self.forks)

    def trains(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            if self.step % self.save_steps == 0:
                since = self.watched_since
                health = Health.HEALTHY if since is None else Health.WATCH
                at = PolicyVersion(self.timeline, self.step)
                self.spooled.append((at, Verdict(health, self.step, since)))
        last = self.rollbacks[-1] if self.rollbacks else None
        if last is not None and self.step > last.probation_until_step:
            self.rollbacks[-1] = replace(last, passed=True)

    def uploads(self, count: int, *, collects: bool = True) -> None:
        """Without `collects` the uploader dies between the listing and what retention would take."""
        for at, verdict in self.spooled[:count]:
            self.ever.add(at)
            kept = retain(self.listed, at, verdict, self.forks, self.spec, self.logging_steps)
            self.listed = kept if collects else sorted({*self.listed, at})
        del self.spooled[:count]

    def crashes(self) -> None:
        """Another machine goes on from the newest checkpoint, without what was in the spool."""
        self.spooled.clear()
        newest = newest_before(self.listed, self.forks, self.timeline, None)
        self.step = 0 if newest is None else newest.step

    def goes_back(self, start: PolicyVersion | None, cause: Cause) -> None:
        fork = Fork(self.timeline + 1, None if start is None else str(start), from_step=self.step)
        self.rollbacks.append(Rollback(fork, cause, self.step, RollbackStage.PROBATION, 0.0))
        self.forks.append(fork)
        self.spooled.clear()
        self.step, self.watched_since = (0 if start is None else start.step), None

    def target(self, onset_step: int) -> Target:
        before_step = target_before_step(onset_step, self.rollbacks)
        return choose_target(self.listed, self.forks, self.timeline, before_step, ever_stored=bool(self.ever))

    def ideal(self, onset_step: int) -> PolicyVersion | None:
        """Where it would go if nothing had ever been deleted."""
        before_step = target_before_step(onset_step, self.rollbacks)
        return newest_before(sorted(self.ever), self.forks, self.timeline, before_step)

    def check(self, onset_step: int) -> Target:
        target, ideal = self.target(onset_step), self.ideal(onset_step)
        if ideal is None:
            assert target.checkpoint is None
            assert bool(target.missing) == bool(self.ever), "never step 0 though there was a checkpoint"
            return target
        assert target.checkpoint is not None, f"nothing is from before {onset_step}: {self.listed}"
        furthest = max(self.step, *(at.step for at in self.ever))
        assert furthest - target.checkpoint.step <= 2 * (furthest - ideal.step), (target, ideal, self.listed)
        return target


STEPS = st.integers(0, 400)
WHAT = st.one_of(
    st.tuples(st.just("train"), STEPS),
    st.tuples(st.just("upload"), st.integers(1, 8)),
    st.tuples(st.just("upload and die"), st.integers(1, 8)),
    st.tuples(st.just("crash"), st.just(0)),
    st.tuples(st.just("watch"), STEPS),
    st.tuples(st.just("trip"), STEPS),
    st.tuples(st.just("out of memory"), st.just(0)),
    st.tuples(st.just("by hand"), STEPS),
)
RUNS = st.builds(
    Run,
    st.sampled_from([1, 2, 3, 5, 10, 25, 50, 64, 100]),
    st.integers(1, 20),
    st.builds(CheckpointsSpec, keep_last=st.integers(1, 4), keep_every_steps=st.sampled_from([None, None, 100])),
)
STORIES = st.lists(WHAT, min_size=1, max_size=25)


def play(run: Run, what: str, number: int) -> None:
    match what:
        case "train":
            run.trains(number)
            run.uploads(max(0, len(run.spooled) - 2))
        case "upload":
            run.uploads(number)
        case "upload and die":
            run.uploads(number, collects=False)
        case "crash":
            run.crashes()
        case "watch":
            run.watched_since = max(1, run.step - number)
        case "trip":
            run.uploads(len(run.spooled))
            target = run.check(max(1, run.step - number))
            if not target.missing:
                run.goes_back(target.checkpoint, Cause.DIVERGED)
        case "out of memory":
            newest = newest_before(run.listed, run.forks, run.timeline, None)
            run.goes_back(newest, Cause.OUT_OF_MEMORY)
        case "by hand" if run.listed:
            run.goes_back(run.listed[number % len(run.listed)], Cause.USER)


@settings(max_examples=examples(150), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(run=RUNS, story=STORIES, onsets=st.lists(st.integers(1, 2000), min_size=3, max_size=3))
def test_there_is_a_target_at_most_one_doubling_too_old(
    run: Run, story: list[tuple[str, int]], onsets: list[int]
) -> None:
    for what, number in story:
        play(run, what, number)
        for onset in {1 + one % max(1, run.step) for one in onsets}:
            run.check(onset)
    for at in run.ever:
        run.check(at.step + 1)
