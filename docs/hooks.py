"""What the site needs beyond MkDocs: pages by pattern in the navigation, and links to files outside docs/.

Also checks for Markdown that GitHub renders and MkDocs does not.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.plugins.grpo_orch")  # MkDocs counts warnings below `mkdocs`: they fail the build
DOCS = Path(__file__).parent


def on_config(config: Any) -> Any:
    """Replace each pattern in the navigation by the pages that it matches."""
    config.nav = _expanded(config.nav)
    return config


def _expanded(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {title: _expanded(inner) for title, inner in entry.items()}
    if isinstance(entry, list):
        return [
            found
            for inner in entry
            for found in (_matches(inner) if isinstance(inner, str) else [_expanded(inner)])
        ]
    return entry


def _matches(name: str) -> list[str]:
    return sorted(str(path.relative_to(DOCS)) for path in DOCS.glob(name)) if "*" in name else [name]


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Point links to files outside docs/ to the repository. Without one, only their text remains."""
    for number, fault in _faults(markdown):
        log.warning("%s, line %d: %s", page.file.src_uri, number, fault)

    def replaced(link: re.Match[str]) -> str:
        text, path, anchor = link.groups()
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), path))
        if target.startswith("docs/") or target == "docs":
            return link[0]
        if not (DOCS.parent / target).exists():
            log.warning("%s: %s does not exist", page.file.src_uri, path)
        return f"[{text}]({config.repo_url}/blob/main/{target}{anchor or ''})" if config.repo_url else text

    return re.sub(r"\[([^\]]*)\]\(((?:\.\./)+[^)#]*)(#[^)]*)?\)", replaced, markdown)


def _faults(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the fix of each block that only GitHub recognizes."""
    before, is_code = "", False
    for number, line in enumerate(markdown.splitlines(), 1):
        is_code ^= line.lstrip().startswith("```")
        if not is_code and re.match(r" {1,3}([-*] |\d+\. )", line):
            yield number, "indent nested lists by four spaces"
        if re.match(r" {1,3}```", line):
            yield number, "indent code in lists by four spaces"
        if not is_code and re.match(r"[-*] |\d+\. |\|", line) and re.match(r"[^-*\d| ]", before):
            yield number, "put an empty line before lists and tables"
        before = line
