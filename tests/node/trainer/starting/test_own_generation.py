"""A trainer that generates with its own model, by TRL and transformers: no gateway, no node, no policy stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from grpo_orch.policies.serving.wire import Batch, CompletionRequest, PolicyRef
from grpo_orch.tasks.trl.own_generation import OwnGeneration
from tests.node.trainer.rig import GRPO, LORA, Rig, open_rig
from tests.node.trainer.rig_rewards import HELD, HELD_FROM

STEPS = GRPO["max_steps"]
SAMPLING = {
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_tokens": 12,
}
PROMPTS = [[5, 9, 3], [7], [11, 4, 8, 2, 6]]


class ATrainer:
    """What is asked of one."""

    def __init__(self, model: Any, ends: list[int]) -> None:
        self.model, self.eos_token_ids, self.accelerator = model, ends, Accelerator(cpu=True)


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)


def engine(model: Any, ends: list[int] | None = None) -> OwnGeneration:
    made = OwnGeneration("trainer-0-i1", lambda: None)
    made.attach(ATrainer(model, ends or [1]))
    return made


def batch(prompts: list[list[int]], seeds: list[int], **sampling: Any) -> Batch:
    requests = [CompletionRequest(i, p, s) for i, (p, s) in enumerate(zip(prompts, seeds, strict=True))]
    return Batch(PolicyRef("0-3", ""), SAMPLING | sampling, requests, 60.0)


def logprobs_of(model: Any, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Of the tokens after the prompt, in one pass without a cache or padding."""
    with torch.no_grad():
        logits = model.eval()(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_each_token_has_the_models_log_probability(model: Any, temperature: float) -> None:
    made = engine(model).complete(batch(PROMPTS, [1, 2, 3], temperature=temperature)).completions
    for prompt, one in zip(PROMPTS, made, strict=True):
        assert len(one.token_ids) == len(one.logprobs) <= 12
        expected = logprobs_of(model, prompt, one.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, atol=1e-5, rtol=0)


def test_completion_depends_on_its_seed_alone(model: Any) -> None:
    all_ = engine(model).complete(batch(PROMPTS, [1, 2, 3])).completions
    alone = [
        engine(model).complete(batch([p], [s])).completions[0] for p, s in zip(PROMPTS, [1, 2, 3], strict=True)
    ]
    assert [one.token_ids for one in all_] == [one.token_ids for one in alone]
    again = engine(model).complete(batch(PROMPTS, [4, 5, 6])).completions
    assert [one.token_ids for one in all_] != [one.token_ids for one in again]


def test_tokens_are_drawn_with_the_models_probabilities(model: Any) -> None:
    count = 4000
    found = engine(model).complete(batch([PROMPTS[0]] * count, list(range(count)), max_tokens=1)).completions
    with torch.no_grad():
        expected = model.eval()(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    drawn = torch.bincount(torch.tensor([one.token_ids[0] for one in found]), minlength=len(expected)) / count
    assert (drawn - expected).abs().max() < 5 * (0.25 / count) ** 0.5  # five deviations of the most uncertain


def test_generation_stops_at_an_end_token_with_its_reason(model: Any) -> None:
    long = engine(model).complete(batch([PROMPTS[0]], [7])).completions[0]
    assert (len(long.token_ids), long.finish_reason) == (12, "length")
    end = long.token_ids[4]
    ended = engine(model, [end]).complete(batch([PROMPTS[0]], [7])).completions[0]
    until = long.token_ids.index(end) + 1
    assert (ended.token_ids, ended.finish_reason) == (long.token_ids[:until], "stop")
    assert ended.logprobs == pytest.approx(long.logprobs[:until], abs=1e-6)


def test_only_top_k_tokens_are_drawn(model: Any) -> None:
    one = engine(model).complete(batch([PROMPTS[0]], [3], top_k=1)).completions[0]
    with torch.no_grad():
        best = model.generate(torch.tensor([PROMPTS[0]]), do_sample=False, max_new_tokens=12, eos_token_id=-1)
    assert one.token_ids == best[0, len(PROMPTS[0]) :].tolist()
    assert one.logprobs == pytest.approx([0.0] * 12, abs=1e-6)


def test_prompt_without_room_is_refused_and_others_are_not(model: Any) -> None:
    limit = model.config.max_position_embeddings
    found = engine(model).complete(batch([[3] * (limit - 11), [3] * (limit - 12), [5]], [1, 2, 3])).completions
    assert [bool(one.refused) for one in found] == [True, False, False]
    assert (found[0].limit_tokens, found[0].token_ids) == (limit, [])


def test_empty_prompt_or_unknown_token_is_refused(model: Any) -> None:
    size = model.config.vocab_size
    found = engine(model).complete(batch([[], [5, size], [5]], [1, 2, 3])).completions
    beyond = f"token {size} of the prompt is not in the model's vocabulary of {size}"
    assert [one.refused for one in found] == ["the prompt is empty", beyond, ""]


def test_models_generation_config_is_ignored_and_restored(model: Any) -> None:
    model.generation_config.repetition_penalty = 50.0
    before = model.generation_config
    made = engine(model).complete(batch(PROMPTS, [1, 2, 3])).completions[0]
    expected = logprobs_of(model, PROMPTS[0], made.token_ids)
    torch.testing.assert_close(torch.tensor(made.logprobs), expected, atol=1e-5, rtol=0)
    assert model.generation_config is before
    model.generation_config.repetition_penalty = 1.0


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Rig]:
    with open_rig(tmp_path_factory.mktemp("calm"), tiny, replicas=0, grpo={}, evaluates=True) as rig:
        assert rig.wait(rig.start_trainer()) == 0
        yield rig


def test_a_run_trains_without_nodes_and_publishes_nothing(calm: Rig) -> None:
    rows = calm.rows()
    assert [step for step, values in rows.items() if "reward" in values] == list(range(1, STEPS + 1))
    assert max(values["sampling/sampling_logp_difference/max"] for values in calm.trained()) < 1e-4
    assert any("eval_reward" in values for values in rows.values())
    assert calm.published() == []
    assert calm.gateway.asked == []


def test_killed_trainer_rereads_completions_to_same_weights(
    calm: Rig, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HELD, str(tmp_path / "held"))
    spec: dict[str, Any] = {"grpo": {"save_steps": 100}, "reward": "rig_rewards.held"}
    with open_rig(tmp_path, tiny, replicas=0, evaluates=True, **spec) as rig:
        (tmp_path / "held").touch()  # it has taken no further step when it is killed
        trainer = rig.start_trainer()
        rig.until("in the fourth step", lambda: (beat := rig.beat()) is not None and beat.step == HELD_FROM)
        trainer.kill()
        trainer.wait()
        (tmp_path / "held").unlink()
        assert rig.wait(rig.start_trainer(attempt=2), attempt=2) == 0
        assert "rollout_replayed" in rig.log(2).read_text()
        assert rig.digests() == calm.digests()


@pytest.mark.parametrize(
    ("grpo", "difference_max"),
    [
        pytest.param({"gradient_checkpointing": True}, 1e-4, id="activations computed again"),
        pytest.param({"bf16": True}, 0.1, id="mixed precision"),
        pytest.param({"steps_per_generation": 2, "num_iterations": 2}, 1e-4, id="a window of steps"),
    ],
)
def test_generated_tokens_are_the_trained_ones(
    grpo: dict[str, Any], difference_max: float, tiny: Path, tmp_path: Path
) -> None:
    with open_rig(tmp_path, tiny, replicas=0, grpo={"max_steps": 4, **grpo}, peft=LORA) as rig:
        rig.train()
        fresh = [values["sampling/sampling_logp_difference/max"] for values in rig.trained()]
    assert fresh
    assert max(fresh) < difference_max
    assert max(fresh) > 0
