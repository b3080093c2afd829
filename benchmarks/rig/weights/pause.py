"""How long a real vLLM serves nobody while a step's weights change: overwritten where they have changed, against
reloaded from a file that was overwritten and proved before.

On CPUs vLLM packs its linear layers away; here it is kept from that, as on GPUs: `tests.stand_ins.plain_linears`.
In the nodes' environment: `python -m benchmarks.rig.weights.pause FOLDER SHARE`; its last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.weights import delta, safetensors, scratch
from grpo_orch.checkpoint.weights.scratch import Tensor
from grpo_orch.policies.model.spec import Dataset, RolloutSpec, RunSpec, TrainerSpec
from grpo_orch.tasks.machine.node_env import NodeEnv
from grpo_orch.tasks.rollout.policy_folders import Staged
from grpo_orch.tasks.rollout.vllm import flags as vllm_flags
from grpo_orch.tasks.rollout.vllm import server as vllm_server
from grpo_orch.tasks.rollout.vllm.server import Server

LAYERS = 16  # 0.25 billion parameters, with the embedding that is the head as well
STEPS = 5


def pauses(folder: Path, share: float, layers: int = LAYERS) -> dict[str, float]:
    """Medians of seconds over STEPS steps that change this share of all elements, and `pause_share`: the pause of
    an overwrite as a share of that of a reload."""
    _make_model(folder / "base", layers)
    vllm_flags.FIXED["worker-extension-cls"] = "tests.stand_ins.plain_linears.Extension"
    return asyncio.run(_measure(folder, share))


async def _measure(folder: Path, share: float) -> dict[str, float]:
    took_s: dict[str, list[float]] = {}

    async def timed(part: str, work: Awaitable[object]) -> None:
        begun_s = time.perf_counter()
        await work
        took_s.setdefault(part, []).append(time.perf_counter() - begun_s)

    async def file(part: str, work: Callable[[], object]) -> None:
        await timed(part, asyncio.to_thread(work))

    async with aiohttp.ClientSession() as http:
        server: Server = await vllm_server.start(_spec(folder), _env(folder), http)
        try:
            weights, trained = folder / "base" / layout.MODEL, folder / "trained"
            with ThreadPoolExecutor(delta.WORKERS) as pool:
                now = {name: one.copy() for name, one in _bits(weights).items()}
                base = safetensors.content_of(weights, pool)
                scratch.rewrite(trained, _tensors(weights, now), "", folder / delta.NAME, pool)
                await server.load(label := f"0-0@{base}", folder / "base")
                draw = np.random.default_rng(0)
                for step in range(1, STEPS + 1):
                    _change(now, draw, share)
                    changed = folder / f"{step}.bin"
                    after = scratch.rewrite(trained, _tensors(weights, now), base, changed, pool).digest
                    staged = Staged([changed], [base, after], folder)
                    await file("verify", lambda path=changed: delta.verify(path))  # type: ignore[misc]
                    held, label = label, f"0-{step}@{after}"
                    await timed("overwrite", server.overwrite(label, held, staged, None))
                    await file("file", lambda at=changed, of=base: delta.apply([at], weights, of, pool))  # type: ignore[misc]
                    await file("prove", lambda: safetensors.content_of(weights, pool))
                    assert await server.prove(label, folder / "base", 0, 1)
                    await timed("reload", server.load(f"again-{label}", folder / "base"))
                    await server.load(label, folder / "base")
                    base = after
        finally:
            await server.stop()
    found = {part: statistics.median(seconds) for part, seconds in took_s.items()}
    return {
        **found,
        "weights_bytes": float(weights.stat().st_size),
        "pause_share": found["overwrite"] / found["reload"],
    }


def _change(now: dict[str, Any], draw: np.random.Generator, share: float) -> None:
    """Flip the last bit of this share of the elements, as a small step does."""
    for one in now.values():
        hit = draw.integers(0, one.size, int(one.size * share))
        one.reshape(-1)[hit] ^= 1


def _tensors(path: Path, now: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: Tensor(one.dtype, one.shape, one.size_bytes, lambda at=name: now[at].reshape(-1).view(np.uint8))  # type: ignore[misc]
        for name, one in safetensors.layout_of(path).items()
    }


def _bits(path: Path) -> dict[str, Any]:
    """A file's tensors as words of two bytes, which bfloat16 are."""
    with path.open("rb") as file:
        return {
            name: safetensors.read(file.fileno(), one.begin, one.size_bytes).view(np.uint16)
            for name, one in safetensors.layout_of(path).items()
        }


def _make_model(folder: Path, layers: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.node.rollout.engines import make_model

    make_model(folder, 0)  # for its tokenizer
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32768,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=80,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def _spec(folder: Path) -> RunSpec:
    flags = {"dtype": "bfloat16", "enforce-eager": True, "kv-cache-memory-bytes": 2**26, "max-model-len": 256}
    return RunSpec(
        name="pause",
        storage=f"file://{folder}/store",
        trainer=TrainerSpec(model="base", dataset=Dataset(path="json"), reward_funcs=()),
        grpo={},
        workdir=str(folder),
        rollout=RolloutSpec(
            vllm=flags,
            env={"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            recovery="exact",
        ),
    )


def _env(folder: Path) -> NodeEnv:
    return NodeEnv(f"file://{folder}/store", "rollout-0-i1", "token", 1, 0, str(folder), "127.0.0.1")


if __name__ == "__main__":
    print(json.dumps(pauses(Path(sys.argv[1]), float(sys.argv[2]))))
