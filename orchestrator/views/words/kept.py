"""Why each checkpoint of a run stays."""

from __future__ import annotations

from collections.abc import Sequence

from checkpoint.stream.catalog import Checkpoint
from orchestrator.config.rules import LOGGING_STEPS
from policies.control.snapshot import Trainer
from policies.detect.divergence import Verdict
from policies.ledger.retention import RetentionRules, StoredCheckpoint, keep_before, keep_since, rules_keeping
from policies.model.spec import RunSpec
from policies.model.timelines import Fork, lineage, on_lineage
from policies.model.vocabulary import PolicyVersion


def kept_as(
    listed: Sequence[Checkpoint], spec: RunSpec, forks: Sequence[Fork], beat: Trainer | None
) -> dict[PolicyVersion, tuple[str, ...]]:
    """Return the rules of retention that keep each checkpoint, as of the newest one of the present line; none: it
    goes with the next. `beat` is the trainer's last: what its guard says decides how far back some are kept."""
    timeline = max((fork.timeline for fork in forks), default=0)
    stretches = lineage(forks, timeline)
    newest_step = max((one.at.step for one in listed if on_lineage(one.at, stretches)), default=0)
    verdict = beat.verdict if beat is not None and beat.timeline == timeline else None
    logging_steps = int(spec.grpo.get("logging_steps", LOGGING_STEPS))
    rules = RetentionRules(
        spec.checkpoints.keep_last,
        spec.checkpoints.keep_every_steps,
        keep_before(newest_step, verdict or Verdict(), logging_steps),
        keep_since(newest_step, logging_steps),
    )
    return rules_keeping([StoredCheckpoint(one.at, one.pinned) for one in listed], forks, rules)
