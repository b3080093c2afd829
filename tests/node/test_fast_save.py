"""What is written over an old file reads back as what was saved, through the readers that everybody uses."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from grpo_orch.tasks.storing.tensors import TYPES
from grpo_orch.tasks.trl import fast_save
from grpo_orch.tasks.trl.fast_save import OverwrittenFile, fits, overwriting, save_tensors

LARGE = (1 << 20) + 4096 + 3  # elements


def tensors_of(seed: int, size: int) -> dict[str, torch.Tensor]:
    """A tensor of every dtype, and those that are out of the ordinary."""
    generator = torch.Generator().manual_seed(seed)
    random = torch.randint(0, 100, (size,), generator=generator)
    plain = {str(dtype): random.to(dtype) for dtype in TYPES}
    matrix = random[: size // 2 * 2].float().reshape(2, -1)
    return {
        **plain,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(1.5),
        "transposed": matrix.t(),
        "strided": matrix[:, ::3],
        "one byte": torch.tensor([7], dtype=torch.uint8),
        "requires grad": torch.nn.Parameter(matrix.clone()),
    }


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit; float8 has no comparison of its own."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.numel() == 0:
        return True
    bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return bool(torch.equal(*bits))


@pytest.mark.parametrize("old", ["none", "smaller", "same", "larger", "not a checkpoint"])
@pytest.mark.parametrize("size", [5, LARGE])
def test_saved_tensors_are_read_back(tmp_path: Path, size: int, old: str) -> None:
    path = tmp_path / "model.safetensors"
    match old:
        case "smaller" | "same" | "larger":
            save_tensors(
                tensors_of(1, {"smaller": max(2, size // 3), "same": size, "larger": 2 * size}[old]), path
            )
        case "not a checkpoint":
            path.write_bytes(os.urandom(3 * LARGE))
    wanted = tensors_of(2, size)
    save_tensors(wanted, path, {"format": "pt"})
    found = load_file(path)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not same(found[name], wanted[name])] == []
    del found  # it reads the file, which is written over
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    state = {"state": wanted, "step": 3, "groups": [{"lr": 0.1, "params": [0, 1]}]}
    before = torch.save, torch.serialization.get_crc32_options()
    path = path.rename(tmp_path / "optimizer.pt")
    with overwriting():
        torch.save(state, str(path))  # over what is there, larger or smaller
        with (tmp_path / "object").open("wb") as out:
            torch.save([1, 2], out)
    assert (torch.save, torch.serialization.get_crc32_options()) == before
    again = torch.load(path, weights_only=True)
    assert (again["step"], again["groups"]) == (3, state["groups"])
    assert [name for name in wanted if not same(again["state"][name], wanted[name])] == []
    assert torch.load(tmp_path / "object", weights_only=True) == [1, 2]


def test_tied_weights_and_smaller_and_larger_models_through_transformers(tmp_path: Path) -> None:
    def model(layers: int) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=1000,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=layers,
            num_attention_heads=4,
            tie_word_embeddings=True,
        )
        return LlamaForCausalLM(config)

    for layers in (2, 4, 1):
        saved = model(layers)
        with overwriting():
            saved.save_pretrained(tmp_path)
        found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        assert found.lm_head.weight is found.model.embed_tokens.weight
        wanted, state = saved.state_dict(), found.state_dict()
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)


def test_transformers_saves_through_the_names_that_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a new release would save the slow way, and nobody would notice."""
    written: list[str] = []
    real = fast_save.OverwrittenFile

    def noting(path: Path) -> OverwrittenFile:
        written.append(path.name)
        return real(path)

    monkeypatch.setattr(fast_save, "OverwrittenFile", noting)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=10, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    with overwriting():
        model.save_pretrained(tmp_path)
    assert written == ["model.safetensors"]
    written.clear()
    trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    trainer.create_optimizer_and_scheduler(1)
    with overwriting():
        trainer._save_optimizer_and_scheduler(str(tmp_path))
    assert written == ["optimizer.pt", "scheduler.pt"]


def full_by_torch(path: Path) -> None:
    """As it looks when memory ends in mid save: torch's own error stands before the system's."""

    class Full(OverwrittenFile):
        def write(self, data: object) -> int:
            if self.tell() > 1000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    with contextlib.closing(Full(path)) as out:
        torch.save(torch.zeros(10_000), out)


def full_by_system(_: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_by_safetensors(_: Path) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("full", [full_by_torch, full_by_system, full_by_safetensors])
def test_want_of_room_is_told_from_other_errors(tmp_path: Path, full: Callable[[Path], None]) -> None:
    assert not fits(lambda: full(tmp_path / "object"))
    assert fits(lambda: None)
    with pytest.raises(OSError, match="Permission denied"):
        fits(lambda: (_ for _ in ()).throw(OSError(errno.EACCES, os.strerror(errno.EACCES))))
