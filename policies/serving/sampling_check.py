"""Test whether an engine samples tokens by seed and position, using completions that were cut.

After a cut, the same seed at the same position must draw the same noise. The token also depends on the logits,
whose last bits may differ in another batch. So a single token may differ, but more must agree than by chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingCheck:
    """The result, as shares of the tries.

    Args:
        agree: tries with the same next token with and without the cut.
        chance: the expected share for an engine that draws new noise after the cut.
    """

    agree: float
    chance: float

    @property
    def passed(self) -> bool:
        """Whether at least half of the share beyond chance agrees.

        By the binomial distribution for 24 tries, an engine that draws new noise passes once in 1,000 where chance
        is a third, which is high at temperature 2. An engine that draws by position fails twice in 10,000 where
        last bits decide a fifth of its tokens; logits that are off by 0.25 decide a twentieth.
        """
        return self.agree - self.chance >= (1.0 - self.chance) / 2


def judge(whole: Sequence[int], cut: Sequence[int]) -> SamplingCheck:
    """Compare the token at the cut, one per try, of whole completions and of completions that were cut there.

    Chance is how often the tokens of different tries are the same.
    """
    tries = len(whole)
    counts, same = Counter(whole), sum(a == b for a, b in zip(whole, cut, strict=True))
    pairs = sum(counts[token] for token in cut) - same
    return SamplingCheck(same / tries, pairs / (tries * (tries - 1)))
