"""One of two processes that hold a model in FSDP2's shards: `python -m tests.node.ranks.divided PORT RANK`.

It ends with 0 where the weights that are read of the shards are those of the whole model, bit for bit, and are
what they were afterwards.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_orch.tasks.storing.tensors import LazyTensor
from grpo_orch.tasks.trl.parts.publishing import Publishing
from grpo_orch.tasks.trl.weights import whole_weights

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}


def adapted(sizes: dict[str, int] = SIZES) -> Any:
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    return get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))


class Client:
    """Takes the weights as a publisher does: in an order of its own."""

    publishes_adapters = False

    def take_weights(self, weights: Iterator[tuple[str, LazyTensor]]) -> None:
        self._weights = dict(weights)

    def publish(self) -> None:
        self.published = {name: self._weights[name].read().clone() for name in sorted(self._weights)}


def publishing(model: Any, client: Any) -> Publishing:
    """What publishes a model in FSDP2's shards, without a trainer around it."""
    no_gather = {"gather_params": lambda _: nullcontext()}
    division = SimpleNamespace(is_fsdp=True, is_zero3=False, **no_gather)
    return Publishing(model, PartialState(), division, client)


def published(model: Any) -> dict[str, torch.Tensor]:
    """What the first process publishes; nothing in the other."""
    client = Client()
    publishing(model, client).publish()
    return client.published if PartialState().is_main_process else {}


def divided(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(one, DTensor) for one in model.parameters())
    return model


def join(port: str, rank: str) -> None:
    """Make one of a pair of this process."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
    os.environ["WORLD_SIZE"] = "2"
    PartialState(cpu=True)


def main() -> None:
    port, rank = sys.argv[1:]
    join(port, rank)
    whole = {name: one.read() for name, one in whole_weights(adapted(), lambda _: nullcontext()).items()}
    model = divided(adapted())
    once, again = published(model), published(model)
    assert once.keys() == (whole.keys() if rank == "0" else set())
    assert all(torch.allclose(once[name], whole[name], atol=1e-6) for name in once), "other weights"
    assert all(once[name].equal(again[name]) for name in once), "reading them has changed them"
    torch.distributed.barrier()  # gloo aborts a process whose peer leaves a collective early
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
