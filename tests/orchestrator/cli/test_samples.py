"""`grpo-orch samples`, by the real command line over a store in memory: what it prints is one person's text."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_orch.checkpoint.records.samples import Message
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.cli.look import COMPLETION, excerpt
from grpo_orch.orchestrator.views.formatting import INVISIBLE
from tests.budget import examples
from tests.generators.samples import group, handed_over, sample, store_step
from tests.rigs.command_line import Cli
from tests.stand_ins.control_plane import Run

HOSTILE = "\x1b[2J\x1b]0;t\x07\u202egpj.exe\u2066\r\x9b5A\u200b[bold]x[/bold] :smile:"


@pytest.fixture
def store() -> Store:
    return Run().create().store


@pytest.fixture
def cli(store: Store, grpo_orch: Cli) -> Cli:
    return lambda *words: grpo_orch("samples", store.url, *words)


def test_the_newest_step_is_shown(store: Store, cli: Cli) -> None:
    store_step(store, "0-4", group("what is 1 + 1?", sample("2")))
    store_step(store, "0-14", group("what is 2 + 2?", handed_over("it is 5"), sample("4", cut=True, tokens=1234)))
    code, out, err = cli()
    assert (code, err) == (0, "")
    assert out.startswith(
        "step 0-15: 2 completions of 1 prompts, reward 0.5 to 1, mean 0.75; 1 cut, 1\nhanded over\n"
    )
    for line in (
        "0-15/0/0  reward 0.5  advantage 0.5",
        "correct 0.5, brief –",
        "7 tokens, on rollout-0-i1, policy 0-4, mismatch 0.01 mean, 0.25 max",
        "left rollout-1-i1 after 3 tokens",
        "  user: what is 2 + 2?",
        "  assistant: it is 5",
        "1,234 tokens, cut, on rollout-0-i1, policy 0-4",
    ):
        assert line in [one.rstrip() for one in out.splitlines()], line
    assert out.count("what is 2 + 2?") == 1


def test_session_is_shown_turn_by_turn(store: Store, cli: Cli) -> None:
    turns = [("assistant", "let me see", 3), ("tool", "4 \x1b[2J", None), ("assistant", "it is 4", 2)]
    said = [Message(text, role, tokens=tokens) for role, text, tokens in turns]
    one = replace(sample(""), completion=said * 2, failed="ValueError:\nno luck")
    store_step(store, "0-4", group("what is 2 + 2?", one))
    lines = [line.rstrip() for line in cli()[1].splitlines()]
    assert "the agent failed: ValueError: no luck" in lines
    first = lines.index("completion") + 1
    assert lines[first:] == [
        "  1 earlier messages",
        "  tool: 4 ‹U+001B›[2J",
        "  assistant (2 tokens): it is 4",
        "  assistant (3 tokens): let me see",
        "  tool: 4 ‹U+001B›[2J",
        "  assistant (2 tokens): it is 4",
    ]


def test_worst_best_search_and_number(store: Store, cli: Cli) -> None:
    store_step(store, "0-4", *(group(f"prompt {n}", sample(f"answer {n}", n / 10)) for n in range(9)))

    def told(*words: str) -> list[str]:
        return [one["link"] for one in json.loads(cli("-o", "json", *words)[1])["completions"]]

    assert told("--worst", "-n", "2") == ["0-5/0/0", "0-5/1/0"]
    assert told("--best", "-n", "1") == ["0-5/8/0"]
    assert told("--search", "ANSWER 3") == ["0-5/3/0"]
    assert told("--step", "5", "-n", "9") == [f"0-5/{n}/0" for n in range(9)]
    assert "5 more; show them with -n COUNT" in cli()[1]
    assert "no completion or prompt contains that text" in cli("--search", "zzz")[1]


def test_mistakes_are_one_line(store: Store, cli: Cli) -> None:
    assert cli() == (2, "", "no step has been scored yet\n")
    store.put("rollouts/0000/00000004-00.json", b"{}")
    code, out, err = cli("-o", "json")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("the run has no samples")
    assert json.loads(out) == {"error": err.strip(), "exit_code": 2}
    for policy in ("0-4", "0-14", "0-24", "0-34"):
        store_step(store, policy, group("p", sample("c")))
    assert cli("--step", "16")[2] == "no samples of step 16; the nearest are 0-5, 0-15, 0-25\n"
    assert cli("--worst", "--best")[2] == "--worst and --best are mutually exclusive\n"
    code, _, err = cli("--step", "\x1b[2J\n7")
    assert (code, err.count("\n")) == (2, 1)
    assert "\x1b" not in err


def test_json_has_all_of_it(store: Store, cli: Cli) -> None:
    store_step(store, "0-4", group("p", handed_over(HOSTILE * 1000)))
    told = json.loads(cli("-o", "json")[1])
    assert (told["step"], told["policy"], told["completions"][0]["link"]) == ("0-5", "0-4", "0-5/0/0")
    (one,) = told["completions"]
    told = {"text": HOSTILE * 1000, "role": "assistant", "left_out": 0, "after": 0, "tokens": None}
    assert one["completion"] == [told]
    assert one["prompt"][0]["text"] == "p"
    assert one["rewards"][0] == {"function": "correct", "weight": 1.0, "reward": 0.5}
    assert one["handed_over"] == [{"node": "rollout-1-i1", "tokens": 3}]


TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    [HOSTILE, "\n" * 9999, "x" * 10**6, "a\tb"]
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],  # in place of the profile's
    max_examples=examples(100),
    deadline=None,
)
@given(TEXT, TEXT, TEXT)
def test_any_text_prints_as_80_columns_of_plain_characters(
    store: Store, cli: Cli, prompt: str, completion: str, name: str
) -> None:
    store_step(store, "0-4", group(prompt, sample(completion, node=name, refused="")))
    _, out, _ = cli()
    lines = out.split("\n")
    assert len(lines) < 250
    assert not INVISIBLE.search(out)
    assert max(len(line.rstrip()) for line in lines) <= 80


@given(TEXT, st.integers(0, 50), st.integers(0, 10))
def test_a_cut_text_has_its_beginning_and_its_end(text: str, left_out: int, after: int) -> None:
    told = excerpt(Message(text, "", left_out, min(after, len(text))), *COMPLETION)
    assert told.count("\n") <= COMPLETION[1]
    assert len(told) < 12_000
    if not left_out and len(text) < 1000 and text.isascii() and text.isprintable():
        assert told == text
    if left_out:
        assert "characters left out]" in told or "lines left out]" in told
