"""Whether a prompt has room before a completion of full length, in the model's context and in vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies.sizing.engine import whole_number

MAX_MODEL_LEN = "max-model-len"
# With these vLLM takes another length than config.json has (0.32, `_get_and_verify_max_len`).
REPLACED_BY = ("config-format", "hf-config-path", "hf-overrides", "rope-scaling")
OF_MODEL = "its max_position_embeddings"
ALLOWED_BY = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
# Ways to stretch RoPE that max_position_embeddings counts already; for any other vLLM multiplies it by a factor.
COUNTED = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"})


def context_problem(
    flags: Mapping[str, Any], env: Mapping[str, str], completion: int, config: Mapping[str, Any]
) -> tuple[tuple[str, ...], str] | None:
    """Return the key of run.yaml and the reason why every prompt would be refused; None where some may fit.

    How long prompts are is for the tokenizer to say: none of them is counted here.

    Args:
        flags: vLLM's, of `rollout.vllm`; empty where the trainer generates itself.
        env: `rollout.env`.
        completion: `grpo.max_completion_length`.
        config: the model's config.json; empty where it is not known.
    """
    flags = {name.replace("_", "-"): value for name, value in flags.items()}
    positions, asked = _positions(config), whole_number(flags.get(MAX_MODEL_LEN))
    if any(flags.get(name) for name in REPLACED_BY):
        positions = None
    key = ("rollout", "vllm", MAX_MODEL_LEN)
    if asked and asked <= completion:
        message = f"{asked} leaves no room for a prompt: grpo.max_completion_length is {completion}"
        return key, f"{message}; expected more than that"
    if positions is None:
        return None
    longest = max(positions, whole_number(config.get("model_max_length")))  # as vLLM lets it be asked for
    if asked > longest and env.get(ALLOWED_BY, "0") == "0":
        message = f"{asked} is above the model's own context, and vLLM does not start"
        return key, f"{message}; expected at most {positions}, {OF_MODEL}"
    if not asked and positions <= completion:
        message = f"{completion} leaves no room for a prompt in the model's context"
        return ("grpo", "max_completion_length"), f"{message}; expected less than {positions}, {OF_MODEL}"
    return None


def _positions(config: Mapping[str, Any]) -> int | None:
    """The model's context in tokens; None where config.json does not tell it."""
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    scaling = text.get("rope_parameters") or text.get("rope_scaling")
    if isinstance(scaling, Mapping):  # of the model, or of each type of its layers
        parts = [scaling, *(part for part in scaling.values() if isinstance(part, Mapping))]
        if any(one.get("factor") and (one.get("rope_type") or one.get("type")) not in COUNTED for one in parts):
            return None
    found = text.get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else None
