"""The `storage` key: where the run is kept, and what the client of that store needs to reach it.

The options may hold secrets. They are handed to the processes that work on the store and go nowhere else: the
RunSpec has the URL alone, and no message quotes one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestrator.config.document import OPTIONS, Document
from orchestrator.config.problems import Findings, KeyPath, unknown_key
from orchestrator.config.reading.paths import absolute

KEYS = ("url", "options")
EXPECTED = "expected a folder or a URL, as in s3://bucket/my-run"
PASSWORD = "a password in the URL would be stored with the run; expected it among storage.options"
_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*$")
_SLASH_LOST = re.compile(r"^(file|s3|gs|az):")


@dataclass(frozen=True, slots=True)
class Storage:
    """A store as a user names it; `options` in the words of its client, None where the user names a URL alone."""

    url: str
    options: dict[str, str] | None = field(default=None, repr=False)  # may hold secrets


def write_out_storage(document: Document, workdir: Path, findings: Findings) -> dict[str, str]:
    """Bring `storage` to the URL that RunSpec takes, in place, and return the options."""
    data = document.data
    storage = data.get("storage")
    is_sky = data.get("cloud") == "sky"
    if isinstance(storage, str):
        data["storage"] = _url(storage, ("storage",), workdir, findings, is_sky=is_sky)
        return {}
    if not isinstance(storage, dict):
        if "storage" in data:
            findings.add(("storage",), f"{EXPECTED}, or a mapping with the keys {', '.join(KEYS)}")
        return {}
    for key in storage.keys() - set(KEYS):
        findings.add(("storage", key), unknown_key(key, KEYS))
    url = storage.get("url")
    if isinstance(url, str):
        data["storage"] = _url(url, ("storage", "url"), workdir, findings, is_sky=is_sky)
    else:
        if "url" in storage:
            findings.add(("storage", "url"), EXPECTED)
        else:
            findings.missing(("storage", "url"), f"missing; {EXPECTED}")
        data["storage"] = ""  # stands in for the one that was reported
    return _options(storage.get("options"), document.texts, findings)


def _options(options: Any, texts: dict[KeyPath, str], findings: Findings) -> dict[str, str]:
    """Each option as a text. Numbers keep their spelling: an account may be called 0123."""
    if options is None:
        return {}
    if not isinstance(options, dict):
        findings.add(OPTIONS, "expected a mapping of the store client's options, as in {region: eu-west-1}")
        return {}
    found = {}
    for name, value in options.items():
        match value:
            case bool():
                found[name] = "true" if value else "false"
            case str() | int() | float():
                found[name] = texts[(*OPTIONS, name)]
            case _:
                findings.add((*OPTIONS, name), "expected text, a number, true or false")
    return found


def _url(url: str, here: KeyPath, workdir: Path, findings: Findings, *, is_sky: bool) -> str:
    """`./run`, `/data/run` and `file://./run` become `file:///...`; other URLs stay as they are."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "file", url
    if problem := _problem(url, scheme, rest):
        findings.add(here, problem)
    elif scheme != "file":
        return url.rstrip("/")
    elif is_sky:
        findings.add(here, "a folder is on this machine only; with cloud: sky, expected s3://, gs:// or az://")
    elif not is_text(found := f"file://{absolute(rest, workdir)}"):
        findings.add(here, f"{found!a} is no text in UTF-8; expected a folder whose name is")
    else:
        return found
    return url


def _problem(url: str, scheme: str, rest: str) -> str:
    """What is wrong with a store's URL by its look; whether its scheme can be opened, the store says."""
    if "://" not in url and (found := _SLASH_LOST.match(url)):
        return f"neither a folder nor a URL; expected {found[1]}:// and what follows"
    if url.startswith("//"):
        return f"nothing stands before //; {EXPECTED}"
    if scheme == "memory":
        return f"memory:// ends with its process; {EXPECTED}"
    if not _SCHEME.match(scheme):
        return f"what stands before :// is no URL scheme; {EXPECTED}"
    if not rest.strip("/ "):
        return f"names no folder or bucket; {EXPECTED}"
    if unusual := [char for char in "?#%\\" if char in rest]:
        return f"{unusual[0]!r} means something else in a URL; expected a path without it"
    if scheme != "file" and has_password(url):
        return PASSWORD
    return ""


def is_text(url: str) -> bool:
    """Whether a store's URL can be written down: a path has stand-ins of Python's for bytes that are no text."""
    return not any("\ud800" <= char <= "\udfff" for char in url)


def has_password(url: str) -> bool:
    """Whether a store's URL has one."""
    try:
        return urlsplit(url).password is not None
    except ValueError:  # brackets that hold no address: no password either
        return False
