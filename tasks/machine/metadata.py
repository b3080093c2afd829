"""Watch the metadata services of AWS, GCP and Azure for preemption notices and AWS's rebalance recommendations.

The watch detects the cloud, then polls its service every second. Without a service, as on Kubernetes or
on-premises machines, it only repeats the detection now and then. Errors of a service are ignored: the machine then
works without notices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import httpx
import msgspec

from grpo_orch.policies.control.leaving import NOTICE_S

BASE = "http://169.254.169.254"  # link-local, the same on all three
TIMEOUT_S = 1.0
POLL_S = 1.0
DETECT_S = 60.0  # between two detections while no service answers
# ValueError: invalid UTF-8, unexpected JSON, or a token with characters that a header cannot contain.
NO_ANSWER = (httpx.HTTPError, ValueError, RecursionError)
AWS_TOKEN_TTL_S = 21600  # the maximum


class MetadataService(Protocol):
    """The metadata service of one cloud. All calls raise NO_ANSWER for a missing or invalid answer.

    `notice_s` is the minimum time between a notice and the machine's end.
    """

    @property
    def notice_s(self) -> float: ...

    def locate(self, http: httpx.Client) -> str | None:
        """Return the machine's zone; None if it is not on this cloud."""

    def notice(self, http: httpx.Client) -> str:
        """Return the announced action; empty before a notice."""

    def rebalance(self, http: httpx.Client) -> str:
        """Return the rebalance recommendation; empty without one. The machine may be kept nevertheless."""


@dataclass(slots=True)
class Aws:
    """EC2's service, with a session token (IMDSv2)."""

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
        answer = self._get_renewing(http, "spot/instance-action")
        if answer.status_code != httpx.codes.OK:
            return ""  # 404 before a notice
        action = msgspec.json.decode(answer.content, type=_AwsAction)
        return f"{action.action} at {action.time}"

    def rebalance(self, http: httpx.Client) -> str:
        """See `MetadataService.rebalance`. EC2 never withdraws a recommendation."""
        answer = self._get_renewing(http, "events/recommendations/rebalance")
        if answer.status_code != httpx.codes.OK:
            return ""
        advice = msgspec.json.decode(answer.content, type=_AwsAdvice)
        return f"rebalance recommendation of {advice.noticeTime}"

    def _get_renewing(self, http: httpx.Client, path: str) -> httpx.Response:
        answer = self._get(http, path)
        if answer.status_code != httpx.codes.UNAUTHORIZED:
            return answer
        self._renew(http)  # the token has expired
        return self._get(http, path)

    def _renew(self, http: httpx.Client) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(AWS_TOKEN_TTL_S)}
        answer = http.put(f"{self.base}/latest/api/token", headers=headers)
        self.token = answer.text if answer.status_code == httpx.codes.OK else ""

    def _get(self, http: httpx.Client, path: str) -> httpx.Response:
        return http.get(f"{self.base}/latest/meta-data/{path}", headers={"X-aws-ec2-metadata-token": self.token})


@dataclass(slots=True)
class Gcp:
    """Compute Engine's service. Maintenance also ends machines with accelerators, with an hour's notice."""

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
        """See `MetadataService.rebalance`. GCP has no recommendations."""
        return ""

    def _get(self, http: httpx.Client, path: str) -> httpx.Response:
        url = f"{self.base}/computeMetadata/v1/instance/{path}"
        return http.get(url, headers={"Metadata-Flavor": "Google"})


@dataclass(slots=True)
class Azure:
    """Azure's service. The first answer about events may take minutes, since the request enables them."""

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
        # The list includes events of other machines in the scale set or availability set.
        mine = (event for event in found.Events if event.EventType == "Preempt" and self.name in event.Resources)
        return next((f"Preempt not before {event.NotBefore or 'now'}" for event in mine), "")

    def rebalance(self, http: httpx.Client) -> str:  # noqa: ARG002  # the protocol's signature
        """See `MetadataService.rebalance`. This version of the service has no recommendations."""
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
    """Return one service for each supported cloud."""
    return Aws(), Gcp(), Azure()


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Callbacks, each called at most once.

    Their arguments are the zone; the rebalance recommendation; the notice and the seconds until the machine's end.
    """

    located: Callable[[str], None]
    rebalance: Callable[[str], None]
    noticed: Callable[[str, float], None]


def watch(
    services: Sequence[MetadataService], callbacks: Callbacks, stop: threading.Event, poll_s: float = POLL_S
) -> None:
    """Poll the machine's metadata service until the preemption notice or `stop`.

    Run it in a thread, since it blocks on the network.
    """
    # Not through a proxy, which would answer for its own machine.
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as http:
        while (located := _detect(services, http)) is None:
            if stop.wait(DETECT_S):
                return
        service, zone = located
        callbacks.located(zone)
        is_recommended = False
        while not (notice := _answer_of(service.notice, http)):
            if not is_recommended and (recommendation := _answer_of(service.rebalance, http)):
                is_recommended = True
                callbacks.rebalance(recommendation)
            if stop.wait(poll_s):
                return
        callbacks.noticed(notice, service.notice_s)


def _detect(services: Sequence[MetadataService], http: httpx.Client) -> tuple[MetadataService, str] | None:
    for service in services:
        try:
            zone = service.locate(http)
        except NO_ANSWER:
            continue
        if zone is not None:
            return service, zone
    return None


def _answer_of(call: Callable[[httpx.Client], str], http: httpx.Client) -> str:
    try:
        return call(http)
    except NO_ANSWER:
        return ""
