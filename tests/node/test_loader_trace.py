"""A worker's own account of a load: where elements were put, to be overwritten, and what has no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from grpo_orch.tasks.rollout.vllm.loader_trace import LoaderNotTraced, bits, places_of
from grpo_orch.tasks.rollout.vllm.worker import Extension

SHAPES = {
    "q": (8, 6),
    "k": (4, 6),
    "row": (6, 8),
    "experts": (3, 8, 6),
    "packed": (4, 8),
    "bias": (6,),
    "one": (1, 1),
}
TYPES = {name: torch.int8 if name == "packed" else torch.float32 for name in SHAPES}


class Model(torch.nn.Module):
    """One of two ranks: fused rows, narrowed columns, experts one by one, a transposed and a padded tensor."""

    def __init__(self, rank: int, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.rank = rank
        for name, shape, kind in (
            ("qk", (6, 6), dtype),
            ("row", (6, 4), dtype),
            ("experts", (3, 4, 6), dtype),
            ("packed", (8, 2), torch.int8),
            ("bias", (8,), dtype),
            ("one", (1, 1), dtype),
        ):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=kind), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        for name, one in weights:
            rank = self.rank
            match name:
                case "q":
                    self.qk.data.narrow(0, 0, 4).copy_(one.narrow(0, 4 * rank, 4))
                case "k":
                    self.qk.data[4:].copy_(one[2 * rank : 2 * rank + 2])
                case "row":
                    self.row.data.copy_(one.narrow(1, 4 * rank, 4))
                case "experts":
                    for expert in range(3):
                        self.experts.data[expert].copy_(one[expert].narrow(0, 4 * rank, 4).to("cpu"))
                case "packed":
                    self.packed.data[:, :].copy_(one.t()[:, 2 * rank : 2 * rank + 2])
                case "bias":
                    self.bias[:6].data.copy_(one)
                    self.bias[6:].data.fill_(0)
                case _:
                    self.one.data.copy_(one)


def drawn(draw: Any) -> dict[str, Any]:
    return {
        name: torch.randn(shape, generator=draw)
        if TYPES[name].is_floating_point
        else torch.randint(-128, 128, shape, dtype=torch.int8, generator=draw)
        for name, shape in SHAPES.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1])
def test_traced_writes_equal_a_real_load(rank: int, dtype: Any) -> None:
    draw, model = torch.Generator().manual_seed(rank), Model(rank, dtype)
    places = places_of(model, {name: (TYPES[name], shape) for name, shape in SHAPES.items()})
    assert all(not one.any() for one in model.parameters()), "nothing was loaded meanwhile"
    held = drawn(draw)
    model.load_weights(held.items())
    for _ in range(20):
        fresh = drawn(draw)
        fresh["q"][0, :2], fresh["k"][0, 0] = torch.tensor([torch.nan, -0.0]), torch.inf
        for name, one in held.items():
            hit = torch.rand(one.shape, generator=draw) < 0.3
            held[name] = torch.where(hit, fresh[name], one)
            at = hit.flatten().nonzero()[:, 0]
            assert all(part.write(at, held[name].flatten()[at]) for part in places[name])
        whole = Model(rank, dtype)
        whole.load_weights(held.items())
        for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(bits(ours), bits(theirs)), name


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (lambda model, one: model.w.data.copy_(one + 1), "w is an argument of aten.add"),
        (lambda model, one: model.w.data.copy_(one.to(torch.float64)), "w is an argument of aten._to_copy"),
        (lambda model, one: model.w.data.copy_(torch.cat([one[:2], one[2:]])), "w is an argument of aten.cat"),
        (lambda model, one: model.w.data.copy_(one[:1]), r"w \[1, 4\] is copied to shape \[4, 4\]"),
        (lambda _, one: torch.empty(4, 4).copy_(one), "to a tensor that is not a parameter"),
        (lambda model, one: model.w.data.add_(one), "w is an argument of aten.add_"),
        (lambda model, one: model.w.data.fill_(one[0, 0].item()), "w is an argument of|meta"),
        (lambda model, _: model.gone, "AttributeError"),
    ],
)
def test_a_loader_that_does_more_than_copy_is_not_followed(load: Callable[[Any, Any], Any], why: str) -> None:
    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.full((4, 4), 7.0), requires_grad=False)

        def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
            for _, one in weights:
                load(self, one)

    model = Other()
    with pytest.raises(LoaderNotTraced, match=why):
        places_of(model, {"w": (torch.float32, (4, 4))})
    assert torch.equal(model.w, torch.full((4, 4), 7.0))


def test_worker_lists_parameters_without_weights() -> None:
    loaded: list[str] = []

    def load_weights(weights: list[str]) -> set[str]:
        loaded.extend(weights)
        return set(weights)

    model = SimpleNamespace(
        named_parameters=lambda: [(name, None) for name in ("a", "b", "head")], load_weights=load_weights
    )
    worker: Any = SimpleNamespace(
        get_model=lambda: model, vllm_config=SimpleNamespace(load_config=SimpleNamespace(load_format="dummy"))
    )
    worker_class = cast("Any", Extension)
    worker_class.await_weights(worker)
    assert worker.vllm_config.load_config.load_format == "auto"
    assert worker_class.missing_weights(worker) == sorted(["a", "b", "head"])
    model.load_weights(["a", "b"])
    assert worker_class.missing_weights(worker) == ["head"]
    model.load_weights(["head"])
    assert worker_class.missing_weights(worker) == []
    assert loaded == ["a", "b", "head"]
