"""Examples of commands, which end their help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

EXAMPLES: Mapping[str, Sequence[str]] = {
    "init": ("grpo-orch init", "grpo-orch init --recipe gsm8k-zero2 my-run --name my-run"),
    "schema": ("grpo-orch schema > run.schema.json",),
    "validate": ("grpo-orch validate run.yaml", "grpo-orch validate run.yaml -o json"),
    "plan": ("grpo-orch plan run.yaml",),
    "doctor": ("grpo-orch doctor", "grpo-orch doctor run.yaml"),
    "node-env": ("grpo-orch node-env --yes",),
    "demo": ("grpo-orch demo", "grpo-orch demo --yes my-demo"),
    "up": ("grpo-orch up run.yaml", "grpo-orch up run.yaml --yes --detach -o json"),
    "status": ("grpo-orch status -w", "grpo-orch status s3://my-bucket/runs/digits -o json"),
    "logs": ("grpo-orch logs trainer-0 -f", "grpo-orch logs daemon s3://my-bucket/runs/digits"),
    "events": ("grpo-orch events -f", "grpo-orch events s3://my-bucket/runs/digits -o json"),
    "explain": ("grpo-orch explain",),
    "resume": (
        "grpo-orch resume s3://my-bucket/runs/digits",
        "grpo-orch resume s3://my-bucket/runs/digits --set max_steps=1000",
    ),
    "rollback": ("grpo-orch rollback", "grpo-orch rollback --to 0-120 --set learning_rate=5e-7"),
    "down": ("grpo-orch down", "grpo-orch down s3://my-bucket/runs/digits --now"),
    "report": ("grpo-orch report", "grpo-orch report s3://my-bucket/runs/digits -o json"),
    "plot": ("grpo-orch plot --out digits.png",),
    "samples": ("grpo-orch samples --worst", "grpo-orch samples --step 120 --search sorry -n 20"),
    "web": ("grpo-orch web s3://my-bucket/runs/digits",),
    "detect": ("grpo-orch detect trainer_state.json", "grpo-orch detect runs/*/metrics.jsonl -o json"),
    "simulate": ("grpo-orch simulate run.yaml", "grpo-orch simulate run.yaml --climate storms --seeds 100"),
    "eval": ("grpo-orch eval", "grpo-orch eval --base --step 200 --step 400 --rows 500 --yes"),
    "checkpoints": ("grpo-orch checkpoints ls", "grpo-orch checkpoints export latest ./model"),
    "checkpoints ls": ("grpo-orch checkpoints ls", "grpo-orch checkpoints ls s3://my-bucket/runs/digits -o json"),
    "checkpoints pin": ("grpo-orch checkpoints pin 0-120",),
    "checkpoints unpin": ("grpo-orch checkpoints unpin 0-120",),
    "checkpoints verify": ("grpo-orch checkpoints verify", "grpo-orch checkpoints verify latest"),
    "checkpoints export": ("grpo-orch checkpoints export latest ./model",),
    "members": ("grpo-orch members ls", "grpo-orch members drain rollout-1"),
    "members ls": ("grpo-orch members ls",),
    "members drain": ("grpo-orch members drain rollout-1",),
    "members remove": ("grpo-orch members remove rollout-1",),
}


def epilog(command: str) -> str:
    """Return the end of a command's help."""
    return "Examples:\n" + "\n".join(f"$ {example}" for example in EXAMPLES[command])
