"""Preemption notices: heard from each cloud's metadata service, and from no other sign."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from grpo_orch.tasks.machine import metadata
from grpo_orch.tasks.machine.metadata import Aws, Azure, Gcp, MetadataService
from tests.budget import HANG_S, until
from tests.rigs.metadata import FakeMetadata, fake_metadata


@dataclass
class Watched:
    """A watch in a thread, over the three clouds' clients at the fakes' addresses, and what it told."""

    known: tuple[MetadataService, ...]
    recommendations: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        notices = self.notices
        args = (self.known, self.recommendations.append, lambda why, _: notices.append(why), self.stop, 0.02)
        self.thread = threading.Thread(target=metadata.watch, args=args)
        self.thread.start()

    def close(self) -> None:
        self.stop.set()
        self.thread.join()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def on(stack: ExitStack, cloud: str) -> tuple[FakeMetadata, Watched]:
    """A machine of that cloud: one address, at which all three are asked for."""
    fake = stack.enter_context(fake_metadata(cloud))
    watched = Watched((Aws(fake.url), Gcp(fake.url), Azure(fake.url)))
    stack.callback(watched.close)
    return fake, watched


SAID = {
    "aws": "terminate at 2026-05-01T10:02:00Z",
    "gcp": "preempted",
    "azure": "Preempt not before Fri, 01 May 2026 10:00:30 GMT",
}


PATHS = {"aws": "/latest/", "gcp": "/computeMetadata/", "azure": "/metadata/"}
POLLED = {
    "aws": "/latest/meta-data/spot/instance-action",
    "gcp": "/computeMetadata/v1/instance/preempted",
    "azure": "/metadata/scheduledevents",
}


def polled(fake: FakeMetadata) -> None:
    until("a look for a notice", lambda: POLLED[fake.cloud] in fake.asked)


@pytest.mark.parametrize("cloud", SAID)
def test_each_cloud_is_known_and_notice_given_once(stack: ExitStack, cloud: str) -> None:
    fake, watched = on(stack, cloud)
    polled(fake)
    asked = len(fake.asked)
    until("another look", lambda: len(fake.asked) > asked + 3)
    assert all(path.startswith(PATHS[cloud]) for path in fake.asked[asked:]), "no other cloud is asked for"
    assert watched.notices == []
    fake.noticed = True
    until("the notice", lambda: watched.notices)
    watched.thread.join(timeout=HANG_S)
    assert not watched.thread.is_alive()
    assert watched.notices == [SAID[cloud]]


REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
ADVICE = "rebalance recommendation of 2026-05-01T10:00:00Z"


def test_rebalance_recommendation_is_reported_once_as_no_notice(stack: ExitStack) -> None:
    fake, watched = on(stack, "aws")
    until("looks without one", lambda: fake.asked.count(REBALANCE) > 2)
    assert watched.recommendations == []
    fake.rebalance = True
    until("the recommendation", lambda: watched.recommendations)
    asked = len(fake.asked)
    until("looks after it", lambda: len(fake.asked) > asked + 3)
    assert (watched.recommendations, watched.notices) == ([ADVICE], [])
    fake.noticed = True
    until("the notice", lambda: watched.notices)
    assert (watched.recommendations, watched.notices) == ([ADVICE], [SAID["aws"]])


def test_notice_at_the_same_moment_hides_a_recommendation(stack: ExitStack) -> None:
    fake = stack.enter_context(fake_metadata("aws"))
    fake.rebalance = fake.noticed = True
    watched = Watched((Aws(fake.url),))
    stack.callback(watched.close)
    until("the notice", lambda: watched.notices)
    assert watched.recommendations == []


@pytest.mark.parametrize("advice", ["<html>", "[" * 100_000, '{"noticeTime": "\udcff"}'])
def test_malformed_recommendation_delays_no_notice(stack: ExitStack, advice: str) -> None:
    """Nor does one that is nested too deeply, or no UTF-8."""
    fake, watched = on(stack, "aws")
    fake.advice, fake.rebalance = advice, True
    until("looks", lambda: fake.asked.count(REBALANCE) > 2)
    fake.noticed = True
    until("the notice", lambda: watched.notices)
    assert watched.recommendations == []


def test_token_that_no_header_can_hold_hides_no_other_cloud(stack: ExitStack) -> None:
    portal, _ = on(stack, "aws")
    portal.token = "\u00e9"
    gcp = stack.enter_context(fake_metadata("gcp"))
    watched = Watched((Aws(portal.url), Gcp(gcp.url)))
    stack.callback(watched.close)
    polled(gcp)


def test_missing_metadata_service_reports_nothing(stack: ExitStack) -> None:
    fake, watched = on(stack, "an ordinary server")
    until("all were asked", lambda: len(fake.asked) >= 3)
    watched.close()
    assert watched.notices == []
    assert len(fake.asked) == 3


def test_hanging_metadata_service_does_not_block_the_others(stack: ExitStack) -> None:
    hung = stack.enter_context(fake_metadata("aws"))
    hung.silent = True
    gcp = stack.enter_context(fake_metadata("gcp"))
    watched = Watched((Aws(hung.url), Aws("http://127.0.0.1:1"), Gcp(gcp.url)))
    stack.callback(watched.close)
    polled(gcp)


def test_expired_session_token_is_renewed_and_hides_nothing(stack: ExitStack) -> None:
    fake, watched = on(stack, "aws")
    polled(fake)
    fake.token, fake.rebalance = "token-2", True
    until("the recommendation", lambda: watched.recommendations)
    assert fake.asked.count("/latest/api/token") == 2
    fake.noticed = True
    until("the notice", lambda: watched.notices)


def test_service_away_for_a_while_is_polled_on(stack: ExitStack) -> None:
    fake, watched = on(stack, "gcp")
    polled(fake)
    fake.silent = True
    asked = len(fake.asked)
    until("a look in vain", lambda: len(fake.asked) > asked)
    fake.silent = False
    fake.noticed = True
    until("the notice", lambda: watched.notices)


def test_preemption_of_another_machine_of_the_set_is_ignored(stack: ExitStack) -> None:
    fake, watched = on(stack, "azure")
    fake.preempted_name = "vm-8"
    fake.noticed = True
    until("looks at the events", lambda: fake.asked.count("/metadata/scheduledevents") > 2)
    assert watched.notices == []
    fake.preempted_name = "vm-7"
    until("the notice", lambda: watched.notices)


def test_no_proxy_is_used_for_metadata(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = stack.enter_context(fake_metadata("aws"))
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy.url)
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    fake, _ = on(stack, "gcp")
    polled(fake)
    assert proxy.asked == []
