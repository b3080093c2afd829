"""One of two processes that hold a model in FSDP2's shards: `python -m tests.node.divided PORT RANK`.

It ends with 0 where the weights that are read of the shards are those of the whole model, bit for bit, and are
what they were afterwards.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.trl.weights import whole_weights

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}


def adapted() -> Any:
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2))
    return get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))


def copied(model: Any, gathered: Any) -> dict[str, torch.Tensor]:
    return {name: one.clone() for name, one in whole_weights(model, gathered)}


def divided(model: Any) -> tuple[Any, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(one, DTensor) for one in model.parameters())
    return model, lambda _: contextlib.nullcontext()


def main() -> None:
    port, rank = sys.argv[1:]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
    os.environ["WORLD_SIZE"] = "2"
    torch.distributed.init_process_group("gloo")
    whole = copied(adapted(), lambda _: contextlib.nullcontext())
    model, gathered = divided(adapted())
    once, again = copied(model, gathered), copied(model, gathered)
    assert once.keys() == whole.keys()
    assert all(torch.allclose(once[name], whole[name], atol=1e-6) for name in whole), "other weights"
    assert all(once[name].equal(again[name]) for name in whole), "reading them has changed them"
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
