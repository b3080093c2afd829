"""A valid run.yaml with the files it names, and how to break it one piece at a time."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from grpo_orch.orchestrator.config.document import parse
from grpo_orch.orchestrator.config.json_schema import json_schema
from grpo_orch.orchestrator.config.load import ConfigError, load_spec

VALID = """\
name: demo
storage: ./run
trainer:
  model: ./model
  dataset: prompts.jsonl
  reward_funcs: [rewards.digit_share]
grpo:
  max_steps: 40
  per_device_train_batch_size: 32
  num_generations: 8
  max_completion_length: 16
  learning_rate: 2e-3
  lr_scheduler_type: constant
  beta: 0.02
rollout:
  replicas: 2
  vllm: {dtype: float32, enforce-eager: true, kv-cache-memory-bytes: 67108864, max-model-len: 256}
  env: {VLLM_CPU_OMP_THREADS_BIND: nobind, OMP_NUM_THREADS: 1}
policies:
  kl: {limit: 0.5}
rehearse:
  faults:
    - {at_step: 5, kill: rollout-0}
    - {at_step: 9, preempt: rollout-1, notice_s: 5}
    - {at_step: 12, kill: daemon, for_s: 3}
    - {at_step: 14, no_capacity: rollouts, for_s: 10}
  prices:
    trainer: {on_demand_usd_per_h: 4.1}
    rollout: {on_demand_usd_per_h: 1.2, spot_usd_per_h: 0.4}
"""

REWARDS = """\
def digit_share(completions, **kwargs):
    return [0.0 for _ in completions]


def no_room(prompts, completions):
    return [0.0 for _ in completions]


async def judged(completions, **kwargs):
    return [0.0 for _ in completions]


named = digit_share
raise RuntimeError("a reward module must not be run to be checked")
"""


# Functions that make prompts of rows, and some that cannot.
PROMPTS = """\
def asks(row):
    return row["question"]


def two(row, other):
    return ""


def none():
    return ""


async def later(row):
    return ""


def free(row, *, style="plain", **_):
    return ""
"""
# Reward functions that TRL can call, and some that it cannot.
FUNCTIONS = """\
import torch_of_mine  # never imported here
from grpo_orch.rewards import in_workers

def judged(completions, answer, **kwargs): ...
def misspelled(completions, answr, **kwargs): ...
def by_key(*, completions, solution, weight=1.0, **kwargs): ...
def by_place(completions, answer, /, **kwargs): ...
def narrow(prompts, completions, completion_ids, trainer_state, log_extra, log_metric): ...
def exact(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, question, answer): ...
async def waits(completions, solution, **kwargs): ...
def played(completions, environments, **kwargs): ...
def own_prompt(completions, prompt, **kwargs): ...

@in_workers()
def scored(text, answer, prompt): ...

@in_workers(limit_s=3.0)
def scored_by(text, key): ...

def decorated(function): ...

@decorated
def hidden(anything): ...
"""
NO_REHEARSAL = (VALID[VALID.index("rehearse:") :], "")
SKY = ("storage: ./run", "storage: s3://bucket/run\ncloud: sky")


def furnish(folder: Path) -> Path:
    """Write the valid file and all it names; return its path."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "prompts.jsonl").write_text('{"prompt": "1"}\n' * 1024)
    (folder / "rewards.py").write_text(REWARDS)
    run_yaml = folder / "run.yaml"
    run_yaml.write_text(VALID)
    return run_yaml


def changed(*changes: tuple[str, str]) -> str:
    """VALID with pieces replaced; each piece must be there exactly once."""
    text = VALID
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in the file"
        text = text.replace(old, new)
    return text


def problem(folder: Path, *changes: tuple[str, str]) -> str:
    """Write VALID with pieces replaced; return its only problem, or nothing."""
    (folder / "run.yaml").write_text(changed(*changes))
    try:
        load_spec(folder / "run.yaml")
    except ConfigError as error:
        [found] = error.problems
        return f"{found.key}: {found.message}"
    return ""


@cache
def _validator() -> Any:
    return jsonschema.Draft202012Validator(json_schema())


def schema_problems(path: Path) -> list[str]:
    """Return what the JSON Schema refuses in a file, as `key: message`."""
    data = parse(path.read_bytes(), str(path))[0].data
    errors = _validator().iter_errors(data)
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in errors]
