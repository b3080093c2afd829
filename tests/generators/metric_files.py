"""A short run, healthy or diverging, and the files in which its metrics may be found."""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_orch.checkpoint.records.metrics import MetricsRow
from grpo_orch.checkpoint.store.codec import to_json

Rows = list[dict[str, float]]
ONSET = 203  # of the diverging runs below: a cliff shows from the next step on


def run(*, diverges: bool, every: int = 1) -> Rows:
    """Rows of a run of 300 steps, each logged as its step; KL goes to 40 nats and the reward with it."""
    drawn = random.Random(7)
    rows = []
    for step in range(every, 300 + every, every):
        bad = diverges and step > ONSET
        rows.append(
            {
                "loss": (0.8 if bad else 0.002) + drawn.gauss(0, 0.001),
                "grad_norm": (30.0 if bad else 0.4) * math.exp(drawn.gauss(0, 0.1)),
                "reward": (0.0 if bad else 0.6) + drawn.gauss(0, 0.03),
                "kl": (40.0 if bad else 0.05) * math.exp(drawn.gauss(0, 0.1)),
                "entropy": (0.01 if bad else 0.5) * math.exp(drawn.gauss(0, 0.05)),
                "completions/mean_length": 200 + drawn.gauss(0, 5),
                "epoch": step / 100,
                "step": step,
            }
        )
    return rows


def repr_log(rows: Rows, *, quoted: bool) -> str:
    """As a Trainer prints it: values as strings in newer versions, no steps, among progress bars and warnings."""
    text = "loading weights\n{'loss_type': 'grpo', 'beta': 0.04, 'kl_estimator': 'k3'}\n"
    for row in rows:
        shown = {key: f"{value:.4g}" if quoted else value for key, value in row.items() if key != "step"}
        text += f"  3%|▎         | 9/300 [00:01<00:41,  7.0it/s]\r{shown}\nWARNING: {{slow}} tokenizer\n"
    return text + "{'train_runtime': '12.3', 'train_loss': '0.1', 'epoch': '3'}\n"


def state(rows: Rows, **said: Any) -> str:
    """A trainer_state.json, with the summary that a Trainer adds at its end."""
    history = [*rows, {"train_runtime": 12.3, "train_loss": 0.1, "kl": 1e9, "step": rows[-1]["step"]}]
    return json.dumps({"epoch": 3.0, "global_step": 300, **said, "log_history": history})


def json_lines(rows: Sequence[Mapping[str, float | None]], name: Callable[[str], str] = str) -> str:
    return "".join(json.dumps({name(key): value for key, value in row.items()}) + "\n" for row in rows)


def in_store(rows: Rows) -> str:
    """A metrics object of a run store."""
    kept = (({k: v for k, v in row.items() if k not in ("step", "epoch")}, int(row["step"])) for row in rows)
    return b"\n".join(to_json(MetricsRow(0, step, 1e9 + step, 1, values)) for values, step in kept).decode()


def in_csv(rows: Rows) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def wandb_name(key: str) -> str:
    return {"step": "train/global_step", "_step": "_step"}.get(key, f"train/{key}")


FORMATS: dict[str, Callable[[Rows], str]] = {
    "trainer_state.json": state,
    "logged floats": lambda rows: repr_log(rows, quoted=False),
    "logged strings": lambda rows: repr_log(rows, quoted=True),
    "JSON lines": json_lines,
    "JSON lines amid text": lambda rows: "".join(f"12:00 INFO {json.dumps(row)} done\n" for row in rows),
    "Weights & Biases": lambda rows: json_lines([{**row, "_step": 7 * row["step"]} for row in rows], wandb_name),
    "a JSON list": json.dumps,
    "a metrics object of ours": in_store,
    "CSV": in_csv,
    "nested JSON lines": lambda rows: "".join(
        json.dumps({"step": row["step"], "data": {"actor/kl_loss": row["kl"], "critic/score/mean": row["reward"]}})
        + "\n"
        for row in rows
    ),
    "with a byte order mark": lambda rows: "\ufeff" + state(rows),
}
