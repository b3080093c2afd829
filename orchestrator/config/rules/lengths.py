"""Whether prompts have room before a completion of full length: in vLLM's context, and in that of a model here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.config.effective import Doubtful, EffectiveRun
from orchestrator.config.model_size import config_in
from orchestrator.config.problems import Findings
from orchestrator.config.rules.trl_features import takes_turns
from policies.sizing.context import MAX_MODEL_LEN, context_problem
from policies.sizing.engine import whole_number


def check_lengths(data: dict[str, Any], workdir: Path, findings: Findings) -> None:
    """Report lengths with which every prompt would be refused."""
    run = EffectiveRun(data, findings)
    try:
        generates_itself = run.at("rollout", "replicas", "max") == 0
        flags = {} if generates_itself else run.at("rollout", "vllm") or {}
        env, length = run.at("rollout", "env") or {}, int(run.grpo("max_completion_length"))
        room, turns = whole_number(run.at("rollout", "vllm", MAX_MODEL_LEN)), takes_turns(run)
        config = config_in(workdir / str(run.at("trainer", "model")) / "config.json")
    except Doubtful:
        return
    if found := context_problem(flags, env, length, config):
        findings.add(*found)
    elif flags and turns and 0 < room <= 2 * length:
        message = f"{room} leaves no room for another turn, whose prompt holds the turns before it"
        expected = f"expected more than twice grpo.max_completion_length, {length}"
        findings.add(("rollout", "vllm", MAX_MODEL_LEN), f"{message}; {expected}")
