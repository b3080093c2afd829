"""Small tasks in text: prompts, their answers, and how right a completion is.

An answer may begin with steps of working and ends with what counts, between < and >.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable

OPENING, CLOSING = "([{", ")]}"
SIZES = range(3, 9)
"""How many characters or digits a task is about, from easy to hard: what models are trained on."""
USUAL = range(5, 10)
"""What runs are about: a little harder."""


def add(draw: random.Random, size: int) -> tuple[str, str]:
    """Two numbers of size / 2 digits, added digit by digit without carrying: each sum modulo 10."""
    digits = [(draw.randrange(10), draw.randrange(10)) for _ in range(size // 2)]
    first, second = ("".join(str(pair[n]) for pair in digits) for n in (0, 1))
    sums = [(a + b) % 10 for a, b in digits]
    working = "".join(f"{a}+{b}={c};" for (a, b), c in zip(digits, sums, strict=True))
    return f"add {first} {second}:", f"{working}<{''.join(map(str, sums))}>"


def sort(draw: random.Random, size: int) -> tuple[str, str]:
    digits = draw.choices(string.digits, k=size)
    return f"sort {''.join(digits)}:", f"<{''.join(sorted(digits))}>"


def reverse(draw: random.Random, size: int) -> tuple[str, str]:
    letters = "".join(draw.choices("abcdefghij", k=size))
    return f"reverse {letters}:", f"<{letters[::-1]}>"


def close(draw: random.Random, size: int) -> tuple[str, str]:
    """Brackets that are open, to be closed from the innermost out."""
    kinds = draw.choices(range(len(OPENING)), k=size)
    return f"close {''.join(OPENING[k] for k in kinds)}:", f"<{''.join(CLOSING[k] for k in reversed(kinds))}>"


def count(draw: random.Random, size: int) -> tuple[str, str]:
    """How often a letter occurs, counted aloud."""
    letters = draw.choices("abc", k=size)
    wanted = draw.choice("abc")
    times = letters.count(wanted)
    return f"count {wanted} {''.join(letters)}:", "".join(f"{wanted}{n + 1} " for n in range(times)) + f"<{times}>"


TASKS: dict[str, Callable[[random.Random, int], tuple[str, str]]] = {
    "add": add,
    "sort": sort,
    "reverse": reverse,
    "close": close,
    "count": count,
}


def examples(task: str, seed: int, number: int, sizes: range = USUAL) -> list[dict[str, str]]:
    """Rows of a data set: `prompt` and `answer`, in random order; of several tasks in turn where + is between."""
    draw = random.Random(seed)
    tasks = itertools.cycle(task.split("+"))
    pairs = [TASKS[next(tasks)](draw, draw.choice(sizes)) for _ in range(number)]
    return [{"prompt": prompt, "answer": answer} for prompt, answer in pairs]


def final(text: str) -> str | None:
    """What stands between the last < and the > that ends the text; None where it has no such end."""
    return text[text.rfind("<") + 1 : -1] if "<" in text and text.endswith(">") else None


def score(text: str, answer: str) -> float:
    """From 0 to 1: 0.1 for the form, 0.3 for the share of characters in their places, 0.6 for all of them."""
    given, wanted = final(text), final(answer)
    if given is None or wanted is None:
        return 0.0
    right = sum(a == b for a, b in zip(given, wanted, strict=False))
    return 0.1 + 0.3 * right / max(len(given), len(wanted)) + 0.6 * (given == wanted)
