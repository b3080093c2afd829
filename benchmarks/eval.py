"""What one batch for a whole evaluation saves: `make bench-eval`.

One run of the tiny model on two vLLM servers is evaluated after each step on 64 prompts, one completion each. In
turns all prompts go to the fleet as one batch, and one by one as TRL's loop asks for them. What TRL computes of
the completions afterwards is the same in both and is in both times.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.rig.local_run import make_tiny, run, tiny_spec

STEPS, WARM_UP = 8, 2
LENGTHS = (16, 64)  # tokens a completion, none of which ends earlier
# In the trainer's process: it foresees an evaluation after even steps alone.
IN_TURNS = """
from grpo_orch.tasks.trl.fleet_client import FleetClient

FleetClient.foresees = property(lambda self: self._trainer.state.global_step % 2 == 0, lambda self, wanted: None)
"""

console = Console()


def main() -> None:
    table = Table("tokens", "one by one, s", "one batch, s", "ratio", title="64 prompts, two vLLM servers on CPU")
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        make_tiny(base / "tiny")
        for tokens in LENGTHS:
            with console.status(f"evaluating with {tokens} tokens a completion"):
                apart, together = measured(base / f"run-{tokens}", base / "tiny", tokens)
            table.add_row(f"{tokens}", f"{apart:.2f}", f"{together:.2f}", f"{apart / together:.1f}")
    console.print(table)


def measured(folder: Path, tiny: Path, tokens: int) -> tuple[float, float]:
    """Median seconds of an evaluation, prompt by prompt and as one batch."""
    spec = tiny_spec(
        tiny,
        max_steps=STEPS,
        save_steps=STEPS,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=1,
        num_generations_eval=1,
        max_completion_length=tokens,
        generation_kwargs={"ignore_eos": True},
    )
    spec["trainer"]["eval_dataset"] = str(tiny / "prompts.jsonl")
    spec["rollout"]["replicas"] = 2
    rows, _ = run(folder, spec, extra=IN_TURNS)
    took = {row.step: row.values["eval_runtime"] for row in rows if "eval_runtime" in row.values}
    sides = [[took[step] for step in sorted(took) if step > WARM_UP and step % 2 == parity] for parity in (1, 0)]
    return median(sides[0]), median(sides[1])


if __name__ == "__main__":
    main()
