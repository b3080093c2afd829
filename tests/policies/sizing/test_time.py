"""Seconds of steps and syncs at the sizes of real models and GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_orch.policies.sizing.shapes import shape_of
from grpo_orch.policies.sizing.speed import (
    Engine,
    Passes,
    StepWork,
    delta_share,
    delta_transfer_s,
    full_transfer_s,
    generate_s,
    gpu_named,
    shared_by_nodes,
    token_s,
    train_s,
)
from tests.generators import model_configs as known

H200 = gpu_named("h200")
assert H200 is not None
PARAMS_32B, WEIGHTS_32B = 32.76e9, 65.5e9  # Qwen2.5-32B: 64 layers, 8 heads of 128 for keys and values
KV_32B = 2 * 64 * 8 * 128 * 2
WORK = StepWork(generated=64, trained=64, prompts=8, prompt_tokens=256, completion_tokens=512)
ENGINE = Engine(1, H200.bandwidth_gb_per_s, H200.tflops, WEIGHTS_32B, KV_32B, PARAMS_32B)


@pytest.mark.parametrize(
    ("weights_gb", "link", "whole", "delta"),
    [  # docs/benchmarks.md
        (15, 10, 27, 3.1),
        (15, 100, 5.3, 2.9),
        (65.5, 10, 117, 13),
        (65.5, 25, 54, 13),
        (65.5, 100, 23, 12),
        (141, 10, 252, 28),
        (141, 100, 49, 27),
    ],
)
def test_sync_takes_the_benchmarks_time(weights_gb: float, link: int, whole: float, delta: float) -> None:
    assert full_transfer_s(weights_gb * 1e9, link) == pytest.approx(whole, rel=0.03)
    assert delta_transfer_s(weights_gb * 1e9, 0.0178, link) == pytest.approx(delta, rel=0.05)


def test_a_slow_link_waits_for_a_large_delta_twice() -> None:
    assert delta_transfer_s(8e9, 1.0, 1) == pytest.approx(64 + 64 + 0.5)


def test_delta_share_is_measured_and_interpolated() -> None:
    assert [delta_share(rate) for rate in (5e-7, 1e-6, 1e-5)] == pytest.approx([0.0106, 0.0178, 0.097])
    shares = [delta_share(rate) for rate in (1e-8, 5e-7, 7e-7, 1e-6, 3e-6, 1e-5, 1e-4, 1e-2)]
    assert shares == sorted(set(shares))
    assert (delta_share(0), delta_share(1)) == (0, 1)


def test_node_reads_the_weights_once_per_token() -> None:
    """65.5 GB at 0.7 of 4.8 TB/s is 19.5 ms; 64 sequences of 512 tokens on average read 8.6 GB of keys, too."""
    assert token_s(ENGINE, WORK, 1) == pytest.approx(0.0195, rel=0.01)
    assert token_s(ENGINE, WORK, 64) == pytest.approx(0.0221, rel=0.01)
    assert token_s(replace(ENGINE, gpus=2), WORK, 1) == pytest.approx(token_s(ENGINE, WORK, 1) / 2)
    one, two, four = (generate_s(ENGINE, WORK, engines) for engines in (1, 2, 4))
    assert one == pytest.approx(11.6, rel=0.03)
    assert one > two > four > 512 * 0.0195  # what no number of nodes gets below
    floor_s, shared_node_s = shared_by_nodes(ENGINE, WORK, 1)
    assert floor_s == pytest.approx(512 * 0.0195, rel=0.01)
    for nodes, seconds in ((1, one), (2, two), (4, four)):
        assert floor_s + shared_node_s / nodes == pytest.approx(seconds, rel=0.02)


def test_many_sequences_wait_or_run_in_rounds() -> None:
    crowd = replace(WORK, generated=2048, prompts=1)
    assert token_s(ENGINE, crowd, 2048) == pytest.approx(2 * PARAMS_32B * 2048 / (989e12 * 0.4))
    held = replace(ENGINE, sequences_max=16)
    each = 512 * token_s(held, WORK, 16)
    assert generate_s(held, WORK, 1) == pytest.approx(4 * each, rel=0.02)
    assert generate_s(held, WORK, 4) == pytest.approx(each, rel=0.02)


def test_attention_outweighs_all_else_where_a_sequence_is_long() -> None:
    """Qwen2.5-7B over 131,072 tokens: 4 x 28 heads x 128 x 28 layers x 131,072 = 52.6 GFLOP a token in a forward
    pass, and 14.1 for its parameters; forward and backward, both three times."""
    shape = shape_of(known.QWEN_2_5_7B)
    assert shape.attention_flops == 4 * 28 * 128 * 28
    plain = Passes(all_weights=True, recomputed=False, reference=False, old=False)
    long = replace(WORK, trained=1, prompt_tokens=1072, completion_tokens=130_000)
    got = train_s(7.07e9, long, plain, 1, 989, shape.attention_flops)
    assert got == pytest.approx(3 * (14.14e9 + 52.6e9) * 131_072 / (989e12 * 0.3), rel=0.01)
    again = Passes(all_weights=False, recomputed=True, reference=True, old=True)
    assert (again.flops_per_param, again.attention_passes) == (10, 6)


def test_a_batch_reads_the_experts_that_its_tokens_are_sent_to() -> None:
    """Two of eight: one sequence reads a quarter of them, two 1 - 0.75 squared, sixty-four all."""
    mixture = replace(ENGINE, kv_bytes=0, experts_bytes=0.8 * WEIGHTS_32B, experts_share=2 / 8)
    whole_s = token_s(replace(ENGINE, kv_bytes=0), WORK, 1)
    for sequences, share in ((1, 0.2 + 0.8 * 0.25), (2, 0.2 + 0.8 * (1 - 0.75**2)), (64, 1.0)):
        assert token_s(mixture, WORK, sequences) == pytest.approx(share * whole_s, rel=1e-6)


def test_a_step_of_training() -> None:
    """Full fine-tuning is the 6 operations of the scaling laws; the 32B recipe has 10, its adapter no weight of
    the base model to learn: 10 x 32.76e9 x 64 x 768 at 0.3 of 989e12."""
    assert Passes(all_weights=True, recomputed=False, reference=False, old=False).flops_per_param == 6
    assert Passes(all_weights=True, recomputed=True, reference=False, old=False).flops_per_param == 8
    recipe = Passes(all_weights=False, recomputed=True, reference=True, old=True)
    assert train_s(PARAMS_32B, WORK, recipe, 1, 989) == pytest.approx(54.3, rel=0.01)
    assert train_s(PARAMS_32B, WORK, recipe, 8, 989) == pytest.approx(54.3 / 8, rel=0.01)
