"""What docs/hooks.py does for the site; `make docs` builds it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from docs.hooks import on_config, on_page_markdown

REPOSITORY = "https://github.com/someone/grpo-orch"


def built(markdown: str, page: str = "page.md", repo_url: str = REPOSITORY) -> str:
    names = SimpleNamespace(file=SimpleNamespace(src_uri=page)), SimpleNamespace(repo_url=repo_url)
    return on_page_markdown(markdown, page=names[0], config=names[1], files=None)


def test_links_out_of_docs_lead_to_the_repository() -> None:
    assert built("[a](../README.md#use-it)") == f"[a]({REPOSITORY}/blob/main/README.md#use-it)"
    assert built("[a](../../examples/agent)", "recipes/tiny.md") == f"[a]({REPOSITORY}/blob/main/examples/agent)"
    assert built("[a](../README.md)", repo_url="") == "a"


def test_links_between_pages_stay() -> None:
    assert built("[a](../store.md#layout)", "decisions/004-obstore.md") == "[a](../store.md#layout)"


@pytest.mark.parametrize(
    "markdown", ["[a](../no-such-file)", "- a\n  - b", "1. a\n\n   ```\n   b\n   ```", "text\n- a", "text\n| a |"]
)
def test_errors_that_only_the_site_shows_are_warnings(markdown: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        built(markdown)
    assert "page.md" in caplog.text


def test_blocks_that_both_show_are_fine(caplog: pytest.LogCaptureFixture) -> None:
    built("text\n\n- a\n    - b\n- c\n\n| a |\n|---|\n\n```\ntext\n- a\n```\n")
    assert caplog.text == ""


def test_pattern_stands_for_its_pages_in_order() -> None:
    config = SimpleNamespace(
        nav=[{"Decisions": ["decisions/README.md", {"All": ["decisions/00[1-4]*.md"]}]}, "a.md"]
    )
    (decisions, last) = on_config(config).nav
    readme, below = decisions["Decisions"]
    assert (readme, last) == ("decisions/README.md", "a.md")
    assert [name[:13] for name in below["All"]] == ["decisions/002", "decisions/004"]
