"""Metadata services of three clouds on 127.0.0.1, in their documented formats, for tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

Answer = tuple[int, str, dict[str, str]]
NOWHERE: Answer = (404, "not found", {})


@dataclass
class FakeMetadata:
    """One service: what it answers, and the paths that were asked for. It listens at `url`."""

    cloud: str
    url: str = ""
    noticed: bool = False
    rebalance: bool = False
    advice: str = '{"noticeTime": "2026-05-01T10:00:00Z"}'
    token: str = "token-1"
    silent: bool = False  # it takes the request, and says nothing for longer than anybody waits
    preempted_name: str = "vm-7"
    asked: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def answer(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        split = urlsplit(path)
        self.asked.append(split.path)
        if self.silent:
            self.released.wait(20)
            return NOWHERE
        query = {name: values[0] for name, values in parse_qs(split.query).items()}
        match self.cloud:
            case "aws":
                return self._aws(method, split.path, headers)
            case "gcp":
                return self._gcp(method, split.path, headers)
            case "azure":
                return self._azure(method, split.path, headers, query)
            case _:
                return NOWHERE

    def _aws(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        if path == "/latest/api/token":
            asked_well = (
                method == "PUT" and 1 <= int(headers.get("x-aws-ec2-metadata-token-ttl-seconds", 0)) <= 21600
            )
            return (200, self.token, {}) if asked_well else (400, "", {})
        if headers.get("x-aws-ec2-metadata-token") != self.token:
            return 401, "", {}
        if path == "/latest/meta-data/events/recommendations/rebalance" and self.rebalance:
            return 200, self.advice, {}
        if path == "/latest/meta-data/spot/instance-action" and self.noticed:
            return 200, '{"action": "terminate", "time": "2026-05-01T10:02:00Z"}', {}
        return NOWHERE

    def _gcp(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        flavor = {"Metadata-Flavor": "Google"}
        if headers.get("metadata-flavor") != "Google":
            return 403, "Missing Metadata-Flavor:Google header.", {}
        values = {
            "zone": "projects/123456/zones/us-central1-a",
            "preempted": "TRUE" if self.noticed else "FALSE",
            "maintenance-event": "NONE",
        }
        name = path.removeprefix("/computeMetadata/v1/instance/")
        return (200, values[name], flavor) if method == "GET" and name in values else (404, "", flavor)

    def _azure(self, method: str, path: str, headers: dict[str, str], query: dict[str, str]) -> Answer:
        if method != "GET" or headers.get("metadata") != "true":
            return 400, '{"error": "Bad request. Required metadata header not specified"}', {}
        if path == "/metadata/instance/compute" and query.get("api-version") == "2021-02-01":
            return 200, json.dumps({"name": "vm-7", "location": "eastus", "zone": "2", "vmId": "13f5"}), {}
        if path == "/metadata/scheduledevents" and query.get("api-version") == "2020-07-01":
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": self._azure_events()}), {}
        return 400, "", {}

    def _azure_events(self) -> list[dict[str, object]]:
        common = {"ResourceType": "VirtualMachine", "EventStatus": "Scheduled", "EventSource": "Platform"}
        reboot: dict[str, object] = {
            "EventId": "A",
            "EventType": "Reboot",
            "Resources": ["vm-7"],
            "NotBefore": "",
            **common,
        }
        preempt: dict[str, object] = {
            "EventId": "B",
            "EventType": "Preempt",
            "Resources": [self.preempted_name],
            "NotBefore": "Fri, 01 May 2026 10:00:30 GMT",
            "DurationInSeconds": -1,
            **common,
        }
        return [reboot, preempt] if self.noticed else [reboot]


@contextmanager
def fake_metadata(cloud: str) -> Iterator[FakeMetadata]:
    """Serve as that cloud's, or, for any other name, as an HTTP server that knows nothing."""
    service = FakeMetadata(cloud)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, text, more = service.answer(self.command, self.path, headers)
            self.send_response(status)
            body = text.encode(errors="surrogateescape")
            for name, value in {**more, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = handle_any

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    service.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield service
    finally:
        service.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
