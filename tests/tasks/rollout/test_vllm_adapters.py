"""One adapter at a time in a stand-in for vLLM's engine: which it has after each end that a change can take."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from policies.serving.wire import MODEL
from tasks.rollout.vllm.guard import change_adapter, drop_adapter


@dataclass
class FakeVllm:
    """Numbers adapters as vLLM does. `workers` tell the layers that they have no place for."""

    refuses: str = ""
    workers: list[list[str] | None] = field(default_factory=lambda: [[]])
    calls: list[str] = field(default_factory=list)
    lora_requests: dict[str, Any] = field(default_factory=dict)
    number: int = 0

    @property
    def state(self) -> Any:
        async def pause_scheduler_async(mode: str, clear_cache: bool) -> None:
            self.calls.append(f"pause {mode} {clear_cache}")

        async def resume_generation() -> None:
            self.calls.append("resume")

        async def remove_lora(number: int) -> None:
            self.calls.append(f"remove {number}")

        async def collective_rpc(method: str, args: tuple[int]) -> list[list[str] | None]:
            self.calls.append(f"{method} {args[0]}")
            return self.workers

        engine = SimpleNamespace(
            engine_core=SimpleNamespace(pause_scheduler_async=pause_scheduler_async),
            resume_generation=resume_generation,
            remove_lora=remove_lora,
            collective_rpc=collective_rpc,
        )
        models = SimpleNamespace(lora_requests=self.lora_requests, load_lora_adapter=self.load)
        return SimpleNamespace(engine_client=engine, openai_serving_models=models)

    async def load(self, wanted: Any) -> Any:
        assert MODEL not in self.lora_requests
        assert not wanted.load_inplace
        if self.refuses:
            return SimpleNamespace(error=SimpleNamespace(message=self.refuses))
        self.number += 1
        self.calls.append(f"load {wanted.lora_path}")
        self.lora_requests[wanted.lora_name] = SimpleNamespace(lora_int_id=self.number, path=wanted.lora_path)
        return "Success"


def test_the_one_before_is_out_before_the_next_is_in() -> None:
    vllm = FakeVllm()
    assert asyncio.run(change_adapter(vllm.state, "/a")) == ""
    assert asyncio.run(change_adapter(vllm.state, "/b")) == ""
    assert vllm.calls == [
        *("pause abort True", "load /a", "resume", "layers_without_place 1"),
        *("pause abort True", "remove 1", "load /b", "resume", "layers_without_place 2"),
    ]
    assert vllm.lora_requests[MODEL].path == "/b"
    asyncio.run(drop_adapter(vllm.state))
    asyncio.run(drop_adapter(vllm.state))
    assert vllm.calls[9:] == ["remove 2"]
    assert vllm.lora_requests == {}


def test_one_that_vllm_does_not_take_leaves_none() -> None:
    vllm = FakeVllm()
    assert asyncio.run(change_adapter(vllm.state, "/a")) == ""
    vllm.refuses = "LoRA rank 9 is greater than max_lora_rank 8."
    why = asyncio.run(change_adapter(vllm.state, "/b"))
    assert why == "vLLM does not load the adapter: LoRA rank 9 is greater than max_lora_rank 8."
    assert vllm.lora_requests == {}
    assert vllm.calls[-1] == "resume"


@pytest.mark.parametrize(
    ("workers", "layer"),
    [
        ([[]], ""),
        ([["lm_head"]], "lm_head"),
        ([["lm_head"], ["lm_head"]], "lm_head"),
        ([["layers.1.q_proj"], ["layers.0.q_proj"]], ""),  # each has the half of the layers
        ([["layers.1.q_proj", "lm_head"], ["layers.0.q_proj", "lm_head"]], "lm_head"),
        ([[], None], "any layer"),
    ],
)
def test_an_adapter_of_which_a_part_has_no_place_is_taken_out(workers: list[list[str] | None], layer: str) -> None:
    vllm = FakeVllm(workers=workers)
    why = asyncio.run(change_adapter(vllm.state, "/a"))
    assert bool(why) == bool(layer)
    assert layer in why
    assert (MODEL in vllm.lora_requests) is not bool(layer)
    assert ("remove 1" in vllm.calls) is bool(layer)
