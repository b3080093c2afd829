"""The trainer's side of the canary: what it computes, and that nothing of the training notices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_orch.policies.serving.canary import LENGTH, disagreement, token_ids_for
from grpo_orch.tasks.trl.canary import canary_of


def model(seed: int = 0, **config: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.15}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **config)).train()


def test_it_is_the_models_own_and_leaves_no_trace() -> None:
    trained = model(attention_dropout=0.5)
    trained.model.layers[1].eval()  # as a part that is frozen
    modes = [module.training for module in trained.modules()]
    drawn, caught = torch.get_rng_state(), []
    trained.register_forward_hook(lambda *_: caught.append(torch.is_grad_enabled()))
    canary = canary_of(trained, "no")
    assert torch.get_rng_state().equal(drawn)
    assert [module.training for module in trained.modules()] == modes
    assert caught == [False]
    assert all(weight.grad is None for weight in trained.parameters())
    assert canary.token_ids == token_ids_for(96)
    assert (canary.dtype, canary.layers) == ("float32", 2)
    with torch.no_grad():
        logits = trained.eval()(input_ids=torch.tensor([canary.token_ids])).logits[0]
    for place in (0, 20, LENGTH - 2):
        expected = logits[place].log_softmax(-1)[canary.token_ids[place + 1]]
        assert canary.logprobs[place] == pytest.approx(float(expected), abs=1e-5)


def test_adapters_count_as_they_do_merged() -> None:
    plain = model()
    alone = canary_of(plain, "no")
    adapted = get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    canary = canary_of(adapted, "no")
    merged = canary_of(adapted.merge_and_unload(), "no")
    ours = [one for one in merged.logprobs if one is not None]
    assert disagreement(canary, ours, "float32") == ""
    assert disagreement(alone, ours, "bfloat16") != ""


@pytest.mark.parametrize(
    ("mixed_precision", "dtype"),
    [("no", "bfloat16"), ("bf16", "bfloat16"), ("fp16", "float16"), ("fp8", "float8")],
)
def test_it_says_what_it_was_computed_in(mixed_precision: str, dtype: str) -> None:
    assert canary_of(model().bfloat16(), mixed_precision).dtype == dtype


def test_weights_that_are_no_numbers_give_a_canary_that_no_node_can_meet() -> None:
    broken = model()
    broken.model.norm.weight.data.fill_(torch.nan)
    canary = canary_of(broken, "no")
    assert set(canary.logprobs) == {None}
    assert disagreement(canary, [-1.0] * (LENGTH - 1), "bfloat16") != ""
