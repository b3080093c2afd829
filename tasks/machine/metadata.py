"""Watch the metadata services of AWS, GCP and Azure for preemption notices and AWS's rebalance recommendations.

The watch detects the cloud, then polls its service every second. Without a service, as on Kubernetes or
on-premises machines, it only repeats the detection now and then. Errors of a service are ignored: the machine then
works without notices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import httpx
import msgspec
import structlog

from grpo_orch.policies.control.leaving import NOTICE_S

BASE = "http://169.254.169.254"  # link-local, the same on all three
TIMEOUT_S = 1.0
POLL_S = 1.0
DETECT_S = 60.0  # between two detections while no service answers
# ValueError: invalid UTF-8 or JSON, or a token with characters that a header cannot contain.
NO_ANSWER = (httpx.HTTPError, ValueError, LookupError, TypeError, RecursionError)
AWS_TOKEN_TTL_S = 21600  # the maximum

log = structlog.get_logger()
Answer = TypeVar("Answer")


class MetadataService:
    """The metadata service of one cloud. All calls raise NO_ANSWER for a missing or invalid answer.

    `notice_s` is the minimum time between a notice and the machine's end.
    """

    notice_s = NOTICE_S

    def __init__(self, base: str = BASE) -> None:
        self._base = base

    def is_present(self, http: httpx.Client) -> bool:
        """Whether the machine is on this cloud."""
        raise NotImplementedError

    def notice(self, http: httpx.Client) -> str:
        """Return the announced action; empty before a notice."""
        raise NotImplementedError

    def rebalance(self, http: httpx.Client) -> str:  # noqa: ARG002  # AWS's need it
        """Return the rebalance recommendation; empty without one. The machine may be kept nevertheless."""
        return ""


class Aws(MetadataService):
    """EC2's service, with a session token (IMDSv2). EC2 never withdraws a recommendation."""

    notice_s = 120.0
    _token = ""

    def is_present(self, http: httpx.Client) -> bool:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(AWS_TOKEN_TTL_S)}
        answer = http.put(f"{self._base}/latest/api/token", headers=headers)
        self._token = answer.text if answer.status_code == httpx.codes.OK else ""
        return bool(self._token) and self._get(http, "").status_code != httpx.codes.UNAUTHORIZED

    def notice(self, http: httpx.Client) -> str:
        action = self._document(http, "spot/instance-action")
        return f"{action['action']} at {action['time']}" if action else ""

    def rebalance(self, http: httpx.Client) -> str:
        advice = self._document(http, "events/recommendations/rebalance")
        return f"rebalance recommendation of {advice['noticeTime']}" if advice else ""

    def _document(self, http: httpx.Client, path: str) -> Any:
        answer = self._get(http, path)
        if answer.status_code == httpx.codes.UNAUTHORIZED and self.is_present(http):  # the token had expired
            answer = self._get(http, path)
        return _decoded(answer)

    def _get(self, http: httpx.Client, path: str) -> httpx.Response:
        return http.get(f"{self._base}/latest/meta-data/{path}", headers={"X-aws-ec2-metadata-token": self._token})


class Gcp(MetadataService):
    """Compute Engine's service. Maintenance also ends machines with accelerators, with an hour's notice."""

    def is_present(self, http: httpx.Client) -> bool:
        return bool(self._get(http, "zone").headers.get("Metadata-Flavor") == "Google")

    def notice(self, http: httpx.Client) -> str:
        if self._get(http, "preempted").text.strip() == "TRUE":
            return "preempted"
        event = self._get(http, "maintenance-event").text.strip()
        return event if event.startswith("TERMINATE") else ""

    def _get(self, http: httpx.Client, path: str) -> httpx.Response:
        url = f"{self._base}/computeMetadata/v1/instance/{path}"
        return http.get(url, headers={"Metadata-Flavor": "Google"})


class Azure(MetadataService):
    """Azure's service. The first answer about events may take minutes, since the request enables them."""

    _name = ""

    def is_present(self, http: httpx.Client) -> bool:
        machine = self._document(http, "instance/compute", "2021-02-01")
        if machine is None:
            return False
        self._name = machine["name"]
        return True

    def notice(self, http: httpx.Client) -> str:
        found = self._document(http, "scheduledevents", "2020-07-01") or {"Events": ()}
        # The list includes events of other machines in the scale set or availability set.
        for event in found["Events"]:
            if event["EventType"] == "Preempt" and self._name in event["Resources"]:
                return f"Preempt not before {event.get('NotBefore') or 'now'}"
        return ""

    def _document(self, http: httpx.Client, path: str, version: str) -> Any:
        params, headers = {"api-version": version}, {"Metadata": "true"}
        return _decoded(http.get(f"{self._base}/metadata/{path}", params=params, headers=headers))


def _decoded(answer: httpx.Response) -> Any:
    """Return the answer's JSON; None without an answer, such as AWS's 404 before a notice."""
    return msgspec.json.decode(answer.content) if answer.status_code == httpx.codes.OK else None


def services() -> tuple[MetadataService, ...]:
    """Return one service for each supported cloud."""
    return Aws(), Gcp(), Azure()


def watch(
    services: Sequence[MetadataService],
    rebalance: Callable[[str], None],
    noticed: Callable[[str, float], None],
    stop: threading.Event,
    poll_s: float = POLL_S,
) -> None:
    """Poll the machine's metadata service until the preemption notice or `stop`.

    Run it in a thread, since it blocks on the network.

    Args:
        rebalance: called at most once, with the rebalance recommendation.
        noticed: called at most once, with the notice and the seconds until the machine's end.
    """
    # Not through a proxy, which would answer for its own machine.
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as http:
        while (service := next((one for one in services if _answer_of(one.is_present, http)), None)) is None:
            if stop.wait(DETECT_S):
                return
        log.info("metadata_service_found", cloud=type(service).__name__)
        is_recommended = False
        while not (notice := _answer_of(service.notice, http)):
            if not is_recommended and (recommendation := _answer_of(service.rebalance, http)):
                is_recommended = True
                rebalance(recommendation)
            if stop.wait(poll_s):
                return
        noticed(notice, service.notice_s)


def _answer_of(call: Callable[[httpx.Client], Answer], http: httpx.Client) -> Answer | None:
    try:
        return call(http)
    except NO_ANSWER:
        return None
