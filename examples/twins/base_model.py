"""A tiny base model: a tokenizer of words, and a Llama that has seen answers of all sorts, few of them good.

So the form that a recipe's rewards ask for, and the right answer, each come up sometimes, as they do from a real
base model: that is what GRPO can make more of. Of a form that never comes up no reward ever tells.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
# A tag, a mark, a word with the space before it, else a character.
PIECES = r"</?[a-z]+>|####|```|\\[a-z]+| ?[A-Za-z_]+|[0-9]|\n|."
CHAT = (
    "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
STEPS, BATCH, RATE = 200, 32, 4e-3


@dataclass(frozen=True, slots=True)
class Task:
    """One row: what the model is asked, and how it may answer, drawn anew each time."""

    prompt: Any  # a text, or the messages of a chat
    answer: Callable[[], str]


def make(tasks: Sequence[Task], folder: Path, seed: int) -> None:
    """Train a base model and write it to `folder`, with its tokenizer."""
    random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # it is too small to be divided
    plain = [one.prompt if isinstance(one.prompt, str) else "".join(_spoken(one.prompt)) for one in tasks]
    tokenizer = _tokenizer(
        [*plain, *(one.answer() for one in tasks for _ in range(20)), "0123456789user: assistant: "]
    )
    prompts = [_tokens(tokenizer, one.prompt) for one in tasks]
    model = _model(len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    for _ in range(STEPS):
        chosen = random.choices(range(len(tasks)), k=BATCH)
        answers = [[*tokenizer(tasks[one].answer()).input_ids, tokenizer.eos_token_id] for one in chosen]
        loss = model(**_batch([prompts[one] for one in chosen], answers)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _spoken(messages: Sequence[dict[str, str]]) -> list[str]:
    return [f"{one['role']}: {one['content']}\n" for one in messages]


def _tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    splitter = pre_tokenizers.Split(Regex(PIECES), "isolated")
    pieces = sorted({piece for text in texts for piece, _ in splitter.pre_tokenize_str(text)})
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *pieces])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = splitter, decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **special)
    tokenizer.chat_template = CHAT
    return tokenizer


def _tokens(tokenizer: PreTrainedTokenizerFast, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt).input_ids)
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _model(vocabulary_size: int) -> LlamaForCausalLM:
    """Two layers of width 64: about 0.1 M parameters."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary_size,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=256,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            initializer_range=0.1,  # about 1 / sqrt(64); the default, 0.02, learns nothing in so few steps
        )
    )


def _batch(prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> dict[str, torch.Tensor]:
    """Padded on the right; the answers alone are learned."""
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}
