"""How many completions a second the rewards score, and how long a sandbox takes to start: `make bench-rewards`.

Where there is another way to the same score it is measured beside ours, in the same call, so that both have met
the same machine: the cheap rules against an empty function in TRL's signature, what is scored in workers against
the same function called in this process, a test in a sandbox that is there against one that is started for it.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from grpo_orch.rewards import code_tests, gsm8k_reward, json_schema, math_reward, think_format, xml_format
from grpo_orch.tasks.rewards.code_tests import sandboxes
from grpo_orch.tasks.rewards.graders import math_verified

AT_LEAST_S = 2.0
ROUNDS = 3
GSM8K = "She sells 16 - 3 - 4 = 9 eggs a day, for $2 each, so she makes 9 * 2 = $18. " * 6
TEXT = f"<think>{GSM8K}</think>\n#### 18"
XML = f"<reasoning>\n{GSM8K}\n</reasoning>\n<answer>\n18\n</answer>"
MATH = GSM8K + r"The answer is \boxed{\frac{%d}{7}}."
PROGRAM = "```python\nn = int(input())\nprint(sum(range(n)))\n```"
TESTS = [{"input": str(n), "output": str(sum(range(n)))} for n in (3, 10, 100, 1000)]
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}

console = Console()
Call = Callable[[], Any]


def rate(call: Call, completions: int) -> float:
    """Completions a second, the best of some rounds: whatever else the machine does only takes away."""
    call()  # workers start, what is imported is imported
    best = 0.0
    for _ in range(ROUNDS):
        calls, began_s = 0, time.perf_counter()
        while (took_s := time.perf_counter() - began_s) < AT_LEAST_S / ROUNDS or not calls:
            call()
            calls += 1
        best = max(best, calls * completions / took_s)
    return best


def empty(completions: Sequence[str], **_: Any) -> list[float]:
    """What TRL's signature costs by itself."""
    return [0.0 for _ in completions]


def fresh_sandbox() -> list[float | None]:
    """One completion in a sandbox that is started for it."""
    sandboxes().close()
    return code_tests([PROGRAM], tests=[TESTS[:1]])


def in_process(answers: Sequence[str], right: str) -> list[Any]:
    """math-verify where it is called, as by most reward functions: no limit holds there."""
    return [math_verified.score(one, right) for one in answers]  # type: ignore[attr-defined]  # as workers find it


def rows() -> list[tuple[str, float, str, float]]:
    """Each reward, its rate, what it is compared with and that one's."""
    many = 1_000
    texts, prompts = [TEXT] * many, ["p"] * many
    nothing = rate(lambda: empty(texts), many)
    maths = [MATH % index for index in range(200)]  # all different: math-verify keeps what it has parsed
    alike = ["3/7"] * len(maths)
    held = code_tests([PROGRAM], tests=[TESTS[:1]])
    assert held == [1.0]
    return [
        ("think_format", rate(lambda: think_format(texts), many), "an empty function", nothing),
        ("xml_format", rate(lambda: xml_format([XML] * many), many), "an empty function", nothing),
        (
            "gsm8k_reward",
            rate(lambda: gsm8k_reward(texts, answer=["#### 18"] * many), many),
            "an empty function",
            nothing,
        ),
        (
            "json_schema",
            rate(lambda: json_schema(prompts, ['{"answer": 18}'] * many, {"schema": SCHEMA}), many),
            "an empty function",
            nothing,
        ),
        (
            "math_reward",
            rate(lambda: math_reward(["p"] * len(maths), maths, solution=alike), len(maths)),
            "in this process, unlimited",
            rate(lambda: in_process(maths, "3/7"), len(maths)),
        ),
        (
            "code_tests, one test",
            rate(lambda: code_tests([PROGRAM] * 100, tests=[TESTS[:1]] * 100), 100),
            "a sandbox for each",
            rate(fresh_sandbox, 1),
        ),
        (
            "code_tests, four tests",
            rate(lambda: code_tests([PROGRAM] * 100, tests=[TESTS] * 100), 100),
            "`python -c`, no sandbox, one test",
            rate(lambda: subprocess.run(["python3", "-c", "print(1)"], stdout=subprocess.DEVNULL, check=True), 1),
        ),
    ]


def main() -> None:
    """Measure and print."""
    table = Table("reward", "completions a second", "beside it", "a second", "ratio")
    for name, ours, other, theirs in rows():
        table.add_row(name, f"{ours:,.0f}", other, f"{theirs:,.0f}", f"{ours / theirs:.3g}")
    console.print(table)
    console.print(f"a sandbox is there after {1000 / rate(fresh_sandbox, 1):.0f} ms, its first test included")


if __name__ == "__main__":
    main()
