"""config.json of public models, cut to what a shape is read from: what their pages on the hub say, by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

QWEN_2_5_32B: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
QWEN_2_5_7B: dict[str, Any] = {
    **QWEN_2_5_32B,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
QWEN_2_5_1_5B: dict[str, Any] = {
    **QWEN_2_5_32B,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
LLAMA_3_2_1B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
QWEN_3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {  # of those that the recipes train
    "Qwen/Qwen2.5-32B-Instruct": QWEN_2_5_32B,
    "Qwen/Qwen2.5-1.5B-Instruct": QWEN_2_5_1_5B,
    "Qwen/Qwen2.5-Math-1.5B": {**QWEN_2_5_1_5B, "max_position_embeddings": 4096},
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA_3_2_1B,
}


def put_in_cache(hub: Path) -> None:
    """Write them into the hub's cache in this folder, without weights, as a download of config.json alone does."""
    for name, config in CONFIGS.items():
        repository = hub / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs/main").write_text("made-by-hand")
        snapshot = repository / "snapshots/made-by-hand"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(config))
