"""Preemption notices, as the metadata services of AWS, GCP and Azure give them to the machine they are about, and
AWS's rebalance recommendations.

First it is found out which cloud this is; from then on that one is asked every second. Where no service answers,
as on Kubernetes or on one's own machines, nothing is said and hardly anything asked. Nothing here raises for what
a service answers or fails to: a machine works on without notices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import httpx
import msgspec

from policies.control.leaving import NOTICE_S

BASE = "http://169.254.169.254"  # link-local, the same on all three
TIMEOUT_S = 1.0
POLL_S = 1.0
DETECT_S = 60.0  # between two looks for a service where none has answered
# ValueError: no UTF-8, no JSON of the service's shape, or a token that no header can hold.
NO_ANSWER = (httpx.HTTPError, ValueError, RecursionError)
AWS_TOKEN_TTL_S = 21600  # the longest there is


class MetadataService(Protocol):
    """One cloud's. All calls raise NO_ANSWER when it does not answer, or answers nonsense.

    `notice_s` is how long the machine stays after a notice, at least.
    """

    @property
    def notice_s(self) -> float: ...

    def locate(self, http: httpx.Client) -> str | None:
        """The machine's zone; None where it is not this cloud that answers."""

    def notice(self, http: httpx.Client) -> str:
        """What the cloud is about to do to the machine; empty while it says nothing."""

    def rebalance(self, http: httpx.Client) -> str:
        """Return the rebalance recommendation; empty while there is none. The machine may stay all the same."""


@dataclass(slots=True)
class Aws:
    """EC2's, by session token (IMDSv2)."""

    base: str = BASE
    token: str = ""
    notice_s: float = 120.0

    def locate(self, http: httpx.Client) -> str | None:
        """See `MetadataService.locate`."""
        self._renew(http)
        if not self.token:
            return None
        answer = self._get(http, "placement/availability-zone")
        return answer.text if answer.status_code == httpx.codes.OK else ""

    def notice(self, http: httpx.Client) -> str:
        """See `MetadataService.notice`."""
        answer = self._ask(http, "spot/instance-action")
        if answer.status_code != httpx.codes.OK:
            return ""  # 404 until there is one
        action = msgspec.json.decode(answer.content, type=_AwsAction)
        return f"{action.action} at {action.time}"

    def rebalance(self, http: httpx.Client) -> str:
        """See `MetadataService.rebalance`. EC2 never withdraws one."""
        answer = self._ask(http, "events/recommendations/rebalance")
        if answer.status_code != httpx.codes.OK:
            return ""
        advice = msgspec.json.decode(answer.content, type=_AwsAdvice)
        return f"rebalance recommendation of {advice.noticeTime}"

    def _ask(self, http: httpx.Client, path: str) -> httpx.Response:
        answer = self._get(http, path)
        if answer.status_code != httpx.codes.UNAUTHORIZED:
            return answer
        self._renew(http)  # the token's time is over
        return self._get(http, path)

    def _renew(self, http: httpx.Client) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(AWS_TOKEN_TTL_S)}
        answer = http.put(f"{self.base}/latest/api/token", headers=headers)
        self.token = answer.text if answer.status_code == httpx.codes.OK else ""

    def _get(self, http: httpx.Client, path: str) -> httpx.Response:
        return http.get(f"{self.base}/latest/meta-data/{path}", headers={"X-aws-ec2-metadata-token": self.token})


@dataclass(slots=True)
class Gcp:
    """Compute Engine's. Machines with accelerators are ended for maintenance, too: that is told an hour before."""

    base: str = BASE
    notice_s: float = NOTICE_S

    def locate(self, http: httpx.Client) -> str | None:
        """See `MetadataService.locate`."""
        answer = self._get(http, "zone")
        if answer.headers.get("Metadata-Flavor") != "Google":
            return None
        return answer.text.rpartition("/")[2]  # of projects/NUMBER/zones/ZONE

    def notice(self, http: httpx.Client) -> str:
        """See `MetadataService.notice`."""
        if self._get(http, "preempted").text.strip() == "TRUE":
            return "preempted"
        event = self._get(http, "maintenance-event").text.strip()
        return event if event.startswith("TERMINATE") else ""

    def rebalance(self, http: httpx.Client) -> str:  # noqa: ARG002  # the protocol's signature
        """See `MetadataService.rebalance`. GCP gives none."""
        return ""

    def _get(self, http: httpx.Client, path: str) -> httpx.Response:
        url = f"{self.base}/computeMetadata/v1/instance/{path}"
        return http.get(url, headers={"Metadata-Flavor": "Google"})


@dataclass(slots=True)
class Azure:
    """Azure's. Its first answer about events may take minutes, for the asking switches them on."""

    base: str = BASE
    name: str = ""
    notice_s: float = NOTICE_S

    def locate(self, http: httpx.Client) -> str | None:
        """See `MetadataService.locate`."""
        answer = self._get(http, "instance/compute", "2021-02-01")
        if answer.status_code != httpx.codes.OK:
            return None
        machine = msgspec.json.decode(answer.content, type=_AzureMachine)
        self.name = machine.name
        return f"{machine.location}-{machine.zone}" if machine.zone else machine.location

    def notice(self, http: httpx.Client) -> str:
        """See `MetadataService.notice`."""
        answer = self._get(http, "scheduledevents", "2020-07-01")
        if answer.status_code != httpx.codes.OK:
            return ""
        found = msgspec.json.decode(answer.content, type=_AzureEvents)
        # Of every machine of the scale set or availability set, not of this one alone.
        mine = (event for event in found.Events if event.EventType == "Preempt" and self.name in event.Resources)
        return next((f"Preempt not before {event.NotBefore or 'now'}" for event in mine), "")

    def rebalance(self, http: httpx.Client) -> str:  # noqa: ARG002  # the protocol's signature
        """See `MetadataService.rebalance`. This version of the service gives none."""
        return ""

    def _get(self, http: httpx.Client, path: str, version: str) -> httpx.Response:
        params = {"api-version": version}
        return http.get(f"{self.base}/metadata/{path}", params=params, headers={"Metadata": "true"})


@dataclass(frozen=True, slots=True)
class _AwsAction:
    action: str
    time: str


@dataclass(frozen=True, slots=True)
class _AwsAdvice:
    noticeTime: str


@dataclass(frozen=True, slots=True)
class _AzureMachine:
    name: str
    location: str
    zone: str = ""


@dataclass(frozen=True, slots=True)
class _AzureEvent:
    EventType: str
    Resources: tuple[str, ...] = ()
    NotBefore: str = ""


@dataclass(frozen=True, slots=True)
class _AzureEvents:
    Events: tuple[_AzureEvent, ...] = ()


def services() -> tuple[MetadataService, ...]:
    """One for each cloud that is known."""
    return Aws(), Gcp(), Azure()


@dataclass(frozen=True, slots=True)
class Heard:
    """Callbacks, each called once at most: with the zone; with a rebalance recommendation; with the notice and for
    how many seconds the machine stays."""

    located: Callable[[str], None]
    rebalance: Callable[[str], None]
    noticed: Callable[[str, float], None]


def watch(known: Sequence[MetadataService], heard: Heard, stop: threading.Event, poll_s: float = POLL_S) -> None:
    """Tell what is `heard` of the machine's end, until its notice.

    To be run in a thread, for it waits on the network. It returns at `stop`, too.
    """
    # Not through a proxy: it would answer for its own machine.
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as http:
        while (found := _detect(known, http)) is None:
            if stop.wait(DETECT_S):
                return
        service, zone = found
        heard.located(zone)
        recommended = False
        while not (why := _said(service.notice, http)):
            if not recommended and (advice := _said(service.rebalance, http)):
                recommended = True
                heard.rebalance(advice)
            if stop.wait(poll_s):
                return
        heard.noticed(why, service.notice_s)


def _detect(known: Sequence[MetadataService], http: httpx.Client) -> tuple[MetadataService, str] | None:
    for service in known:
        try:
            zone = service.locate(http)
        except NO_ANSWER:
            continue
        if zone is not None:
            return service, zone
    return None


def _said(ask: Callable[[httpx.Client], str], http: httpx.Client) -> str:
    try:
        return ask(http)
    except NO_ANSWER:
        return ""
