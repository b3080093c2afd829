"""Make a tiny chat model with random weights that can call tools: `python make_model.py --out build`.

Its vocabulary has each tool call as one token. So a model that knows nothing calls a tool now and then, and learns
on a CPU when to. Nothing else is special: template, tokenizer and model are loaded as any other's, and vLLM's
`hermes` parser reads the calls.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CALLS = [
    {"name": "look", "arguments": {}},
    {"name": "open", "arguments": {"door": "left"}},
    {"name": "open", "arguments": {"door": "right"}},
]
WORDS = ["Find", " it", " behind", " a", " door", "left", "right", "won", "lost", "hm", "well", "so"]
ROLES = ["<user>", "<tool>", "<assistant>"]
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
PROMPTS = 64
# Of each message its role, its words and the token that ends it; of a tool call the token that it is.
TEMPLATE = """{%- for message in messages -%}
<{{ message['role'] }}>
{%- if message['content'] %}{{ message['content'] }}{% endif -%}
{%- for call in message['tool_calls'] or [] -%}
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>
{%- endfor -%}
<eos>
{%- endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}"""


def call_token(call: dict[str, object]) -> str:
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokens = [*SPECIAL, *ROLES, *WORDS, *map(call_token, CALLS)]
    tokenizer = Tokenizer(models.WordLevel({token: at for at, token in enumerate(tokens)}, unk_token="<unk>"))
    longest_first = sorted(map(re.escape, tokens), key=len, reverse=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(longest_first)), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )
    made.chat_template = TEMPLATE
    return made


def make_model(vocabulary_size: int, seed: int, context: int) -> LlamaForCausalLM:
    """Two layers of width 64."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=context,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder to write (default: build)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    parser.add_argument("--context", type=int, default=256, help="longest sequence, in tokens")
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(arguments.out / "model")
    make_model(len(tokenizer), arguments.seed, arguments.context).save_pretrained(arguments.out / "model")
    question = [{"role": "user", "content": "Find it behind a door"}]
    doors = [{"prompt": question, "door": ("left", "right")[number % 2]} for number in range(PROMPTS)]
    (arguments.out / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in doors))
    print(f"wrote {arguments.out}: model, prompts.jsonl")


if __name__ == "__main__":
    main()
