"""Make a tiny Llama with random weights, its tokenizer and its prompts: `python make_model.py --out build`.

Nothing here is specific to grpo-orch: the output is an ordinary model folder and ordinary dataset files.
"""

from __future__ import annotations

import argparse
import json
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = string.digits + string.ascii_letters + " .,:;!?'-+*/=()<>#@"[:18]
TOPICS = ["apples", "rivers", "clocks", "trains", "stones", "clouds", "gardens", "bridges"]
TRAIN_PROMPTS, EVAL_PROMPTS = 64, 4


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, 84 in total."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def make_model(vocabulary_size: int, seed: int) -> LlamaForCausalLM:
    """Return a model with two layers of width 64: 93,000 parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
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
    )
    return LlamaForCausalLM(config)


def write_prompts(path: Path, first: int, count: int) -> None:
    lines = [f"{1 + n // len(TOPICS)} {TOPICS[n % len(TOPICS)]}:" for n in range(first, first + count)]
    path.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder to write (default: build)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(arguments.out / "model")
    make_model(len(tokenizer), arguments.seed).save_pretrained(arguments.out / "model")
    write_prompts(arguments.out / "prompts.jsonl", 0, TRAIN_PROMPTS)
    write_prompts(arguments.out / "held_out.jsonl", TRAIN_PROMPTS, EVAL_PROMPTS)
    print(f"wrote {arguments.out}: model, prompts.jsonl, held_out.jsonl")


if __name__ == "__main__":
    main()
