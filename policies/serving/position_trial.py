"""Whether an engine draws tokens by seed and position, judged by completions that were cut.

After a cut the same seed at the same position must draw the same noise. Whether that gives the same token depends
on the logits too, of which an engine may compute other last bits in another batch. So no single token must agree,
but more of them than by chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trial:
    """Shares of the tries.

    Args:
        agree: those whose next token was the same with and without the cut.
        chance: those of which that would be true had the engine drawn anew.
    """

    agree: float
    chance: float

    @property
    def passed(self) -> bool:
        """Whether at least half of what chance leaves agrees.

        By the binomial, for 24 tries: an engine that draws anew passes once in 1,000 where chance is a third,
        which is much at temperature 2. One that draws by position fails twice in 10,000 where last bits decide a
        fifth of its tokens; logits that are off by 0.25 decide a twentieth.
        """
        return self.agree - self.chance >= (1.0 - self.chance) / 2


def judge(whole: Sequence[int], cut: Sequence[int]) -> Trial:
    """Judge the tokens at one position, a try each: of whole completions, and of those that were cut there.

    Chance is how often the tokens of different tries are the same.
    """
    tries = len(whole)
    there, same = Counter(whole), sum(a == b for a, b in zip(whole, cut, strict=True))
    pairs = sum(there[token] for token in cut) - same
    return Trial(same / tries, pairs / (tries * (tries - 1)))
