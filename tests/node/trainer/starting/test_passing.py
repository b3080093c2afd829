"""Which errors another try may not meet: they never end a run for good."""

from __future__ import annotations

import errno
import importlib
import socket
import ssl

import aiohttp
import pytest
import requests
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from grpo_orch.tasks.trainer.user_objects import is_cut_off, is_mistake, passes

httpx2 = importlib.import_module("httpx2")  # of nodes alone, as the hub's client


def hub_error(status: int) -> HfHubHTTPError:
    asked = httpx2.Request("GET", "https://hub/model")
    return HfHubHTTPError("refused", response=httpx2.Response(status, request=asked))


PASSING = [
    TimeoutError("slow"),
    OSError(errno.EHOSTUNREACH, "no route"),
    OSError(errno.ESTALE, "stale"),
    OSError("Not enough disk space. Needed: 3 GB"),
    OSError(errno.ENOSPC, "No space left on device"),
    LocalEntryNotFoundError("cannot find the requested files in the cache, no connection"),
    socket.gaierror(socket.EAI_AGAIN, "name resolution"),
    ssl.SSLEOFError("cut"),
    httpx2.ReadTimeout("slow"),
    requests.ConnectionError("refused"),
    requests.Timeout("slow"),
    requests.exceptions.ChunkedEncodingError("cut"),
    aiohttp.ServerDisconnectedError(),
    hub_error(429),
    hub_error(503),
]
LASTING = [
    hub_error(404),
    hub_error(401),
    ssl.SSLCertVerificationError("own"),
    FileNotFoundError(errno.ENOENT, "x"),
    ValueError("bad"),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_a_server_that_may_answer_later_is_asked_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a restart in an hour without the hub would end the run for good."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    wrapped = ValueError("the model cannot be loaded")
    wrapped.__cause__ = error
    assert passes(wrapped)
    assert not is_mistake(wrapped)


@pytest.mark.parametrize("error", LASTING, ids=repr)
def test_a_refusal_is_final(error: Exception) -> None:
    assert not passes(error)


def test_a_judge_that_is_late_is_under_the_rule_for_bad_rewards() -> None:
    assert not is_cut_off(requests.Timeout("slow"))


def test_a_file_that_is_not_here_offline_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "is_offline_mode", lambda: True)
    assert not passes(LocalEntryNotFoundError("no such file"))


def test_an_error_raised_from_itself_is_read_once() -> None:
    error = ValueError("in a ring")
    error.__cause__ = error
    assert not passes(error)
