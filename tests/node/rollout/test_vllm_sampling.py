"""Completions that are cut and go on after their first tokens, on a real vLLM: the same as those that were not.

The server is made short of everything: of room in a step, so that prompts are computed in parts, and of cache, so
that requests are preempted and computed anew; whatever is asked runs beside the others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_orch.tasks.rollout.vllm.worker import numbers_at
from tests.node.rollout.engines import VOCABULARY, Node, make_model

SEED = 20
REQUESTS = 64
LENGTH = 250  # prompt and completion
MIXES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 12},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 1.0, "top_p": 0.95, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2},
    {"temperature": 1.0, "logit_bias": {"7": 2.5, "9": -4.0}, "allowed_token_ids": list(range(3, 60))},
    {"temperature": 0.0, "repetition_penalty": 1.3},
]


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    max_tokens: int
    sampling: dict[str, Any]

    def after(self, begun: list[int]) -> Asked:
        return Asked(self.prompt + begun, self.max_tokens - len(begun), self.sampling)


@dataclass(frozen=True)
class Made:
    tokens: list[int]
    logprobs: list[float]


class Sampled(Node):
    """A server with a policy, short of everything, and what asks it."""

    def __init__(self, folder: Path) -> None:
        make_model(folder / "base", seed=0)
        make_model(folder / "policy", seed=1)
        super().__init__(folder, "float32", flags={"max-num-batched-tokens": 256}, recovery="continue")
        self.do(self.server.load("0-0", folder / "policy"))

    def make(self, asked: list[Asked]) -> list[Made]:
        """Have it make them all at once."""

        async def each() -> list[Made]:
            return await asyncio.gather(*(self._make(one, salt) for salt, one in enumerate(asked)))

        return self.do(each())

    async def _make(self, asked: Asked, salt: int) -> Made:
        body = {
            "prompt": asked.prompt,
            "max_tokens": asked.max_tokens,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,
            "cache_salt": f"{salt}-{len(asked.prompt)}",  # as on another server: nothing was computed before
            **asked.sampling,
        }
        status, answer = await self.ask("0-0", body)
        assert status == 200, answer
        (choice,) = answer["choices"]
        return Made(choice["token_ids"], choice["logprobs"]["token_logprobs"])


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampled]:
    node = Sampled(tmp_path_factory.mktemp("node"))
    yield node
    node.stop()


def requests(chance: random.Random) -> list[Asked]:
    made = []
    for number in range(REQUESTS):
        length = chance.randrange(1, 150)
        prompt = [chance.randrange(3, VOCABULARY) for _ in range(length)]
        sampling = {**MIXES[number % len(MIXES)], "seed": chance.randrange(2**63)}
        made.append(Asked(prompt, chance.randrange(20, LENGTH - length), sampling))
    return made


def test_a_completion_goes_on_behind_any_token_as_if_it_had_not_been_cut(node: Sampled) -> None:
    chance = random.Random(SEED)
    asked = requests(chance)
    whole = node.make(asked)
    cuts = [chance.randrange(1, len(one.tokens)) for one in whole]
    rest = node.make([one.after(made.tokens[:cut]) for one, made, cut in zip(asked, whole, cuts, strict=True)])
    assert [made.tokens for made in rest] == [made.tokens[cut:] for made, cut in zip(whole, cuts, strict=True)]
    differences = [
        abs(left - right)
        for made, again, cut in zip(whole, rest, cuts, strict=True)
        for left, right in zip(made.logprobs[cut:], again.logprobs, strict=True)
    ]
    print(
        f"{np.count_nonzero(differences)} of {len(differences)} logprobs differ, by {max(differences):.2g} at most"
    )
    assert max(differences) < 1e-4


def test_a_seed_means_the_same_beside_others_and_alone(node: Sampled) -> None:
    asked = requests(random.Random(SEED + 1))[:6]
    assert [node.make([one])[0].tokens for one in asked] == [made.tokens for made in node.make(asked)]


def test_another_seed_and_another_position_draw_otherwise(node: Sampled) -> None:
    prompt, hot = [5, 6, 7], {"temperature": 2.0}
    made = node.make([Asked(prompt, 40, {**hot, "seed": seed}) for seed in (0, 1, 2, 2**63 - 1)])
    assert len({tuple(one.tokens) for one in made}) == len(made)
    for one in made:
        assert len(set(one.tokens)) > 10  # of 84


def test_positions_are_those_of_splitmix64() -> None:
    # The first numbers of the published reference implementation, seeded with 1234567.
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert numbers_at([1234567] * 3, [0, 1, 2]).tolist() == first
    assert len(set(numbers_at([-(2**63), -1, 0, 2**63 - 1] * 2, [0] * 4 + [4096] * 4).tolist())) == 8
