"""One of two processes that hold a model in FSDP2's shards: `python -m tests.node.divided PORT RANK`.

It ends with 0 where the weights that are read of the shards are those of the whole model, bit for bit, and are
what they were afterwards.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.storing.unread import Unread
from tasks.trl.trl_grpo import FleetGeneration
from tasks.trl.weights import whole_weights

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}


def adapted() -> Any:
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2))
    return get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))


class Client:
    """Takes the weights as a publisher does: in an order of its own."""

    publishes_adapters = False

    def update_named_params(self, _: None, weights: Iterator[tuple[str, Unread]]) -> None:
        self._weights = dict(weights)

    def publish(self) -> None:
        self.published = {name: self._weights[name].read().clone() for name in sorted(self._weights)}


def published(model: Any, **dist: Any) -> dict[str, torch.Tensor]:
    """What the first process publishes; nothing in the other."""
    generation, client = object.__new__(FleetGeneration), Client()
    generation.model, generation._fleet_client = model, client  # type: ignore[assignment]  # a stand-in
    generation.accelerator = PartialState()
    told = {"is_zero3": False, "gather_params": lambda _: contextlib.nullcontext(), **dist}
    generation._dist = SimpleNamespace(**told)
    generation._publish_together()
    return client.published if generation.accelerator.is_main_process else {}


def divided(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(one, DTensor) for one in model.parameters())
    return model


def main() -> None:
    port, rank = sys.argv[1:]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
    os.environ["WORLD_SIZE"] = "2"
    PartialState(cpu=True)
    whole = {
        name: one.read() for name, one in whole_weights(adapted(), lambda _: contextlib.nullcontext()).items()
    }
    model = divided(adapted())
    once, again = (published(model, is_fsdp=True, fsdp_version=2) for _ in range(2))
    assert once.keys() == (whole.keys() if rank == "0" else set())
    assert all(torch.allclose(once[name], whole[name], atol=1e-6) for name in once), "other weights"
    assert all(once[name].equal(again[name]) for name in once), "reading them has changed them"
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
