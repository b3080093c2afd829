"""Whatever a run is like, its screen has no line that is too wide, and loses no part of a number or a name."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from grpo_orch.orchestrator.views.formatting import MORE, duration, fit, in_lines, plain, short, usd, wrap
from grpo_orch.orchestrator.views.screen import LIVE_PHASES, Screen
from grpo_orch.orchestrator.views.view_model import RunView
from tests.generators.run_views import WORDS, reasons, run_views

QUICK = set(Phase) - {Phase.shrink, Phase.explain}  # an example is a whole run: smaller ones take minutes
calm = settings(max_examples=30, deadline=None, phases=QUICK, suppress_health_check=list(HealthCheck))


def drawn(view: RunView, width: int, height: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True, force_terminal=True)
    console.print(Screen(view, height))
    return console.export_text().splitlines()


@calm
@given(run_views, st.integers(1, 200), st.integers(0, 80))
def test_a_screen_of_any_size_is_not_left(view: RunView, width: int, height: int) -> None:
    lines = drawn(view, width, height)
    assert len(lines) <= max(1, height)
    assert max(map(cell_len, lines), default=0) <= width


@calm
@given(run_views)
def test_status_has_every_number_and_name_whole_in_80_columns(view: RunView) -> None:
    lines = drawn(view, 80, 24)
    assert max(map(cell_len, lines)) <= 80
    text = "\n".join(lines)
    assert view.name in lines[0]
    for word in (view.reward, view.kl, view.tokens_per_s):
        assert re.search(rf"(?m)^(reward|kl|tokens) +{re.escape(short(word))}( |$)", text)
    rate = usd(sum(node.price_usd_per_h for node in view.nodes if node.phase in LIVE_PHASES))
    if not told_much(view):
        assert f"{rate} an hour" in text
        if view.checkpoint is not None:
            assert f"{view.checkpoint.version}, {duration(view.checkpoint.age_s)} ago" in text
        if view.daemon.alive and cell_len(plain(view.daemon.host or "")) < 60:
            assert f"/{view.daemon.pid}" in text
    for line in lines:
        assert not re.search(r"(?<!\S)[$\d.,]*\d…", line), line  # a number is whole, or not there


def told_much(view: RunView) -> bool:
    """So much is off that the screen has no room for all else."""
    return len(view.buying_stopped) + (view.rollback is not None) + len(view.health.evidence) > 2


@calm
@given(run_views)
def test_machines_that_are_shown_are_named_whole(view: RunView) -> None:
    known = {node.node for node in view.nodes}
    lines = drawn(replace(view, events=()), 80, 40)
    place = next((place for place, line in enumerate(lines) if line.startswith("node ")), None)
    if place is None:
        return
    found = [line.split()[0] for line in lines[place + 1 :] if re.match(r"(trainer|rollout)-", line)]
    assert set(found) <= known
    more = [re.match(r"(\d+) more$", line.rstrip()) for line in lines[place + 1 :]]
    if len(view.nodes) <= 8:
        assert len(found) + sum(int(one[1]) for one in more if one) == len(view.nodes)


@given(reasons, st.integers(2, 90), st.integers(1, 4))
def test_words_are_cut_between_words(words: str, width: int, most: int) -> None:
    lines = wrap(words, width, most)
    assert len(lines) <= most
    assert all(cell_len(line) <= width for line in lines)
    whole = "".join(plain(words).split())
    told = "".join("".join(lines).split())
    if not told.endswith("…") or told == whole:
        assert told == whole
        return
    cut = told.removesuffix("…")
    assert whole.startswith(cut)
    words_told = " ".join(lines).removesuffix(MORE).split()
    if " ".join(lines).endswith(MORE) and words_told and all(cell_len(w) <= width for w in plain(words).split()):
        assert plain(words).split()[: len(words_told)] == words_told


@pytest.mark.parametrize("words", WORDS)
def test_too_wide_word_is_broken_and_not_lost(words: str) -> None:
    lines = wrap(words, 20, 50)
    assert "".join("".join(lines).split()) == "".join(plain(words).split())
    assert all(cell_len(line) <= 20 for line in lines)


def test_nothing_moves_the_cursor() -> None:
    assert plain("a\x1b[2J\n b\t\x07c") == "a‹U+001B›[2J b ‹U+0007›c"
    assert fit("one two three", 9) == "one two …"
    assert fit("容量不足のため 待つ", 10) == "容量不足…"
    assert in_lines(["one", "two", "three"], 9, 2) == ["one · two", "three"]
    assert in_lines(["one", "two", "three"], 9, 1) == ["one · two"]


def test_numbers_do_not_break_at_a_lines_end() -> None:
    assert wrap("it cost 1,234.56 USD in all", 14, 3) == ["it cost", "1,234.56 USD", "in all"]


def test_word_without_width_is_wrapped() -> None:
    """A modifier of skin colour alone has no cells, and its space no room behind a full line."""
    assert wrap(f"{'x' * 10} \U0001f3fb end", 10, 3) == ["x" * 10, "\U0001f3fb end"]
