"""One member of the gateway, as a node's agent would announce it: `... announcer URL NODE ADDRESS POLICY`.

It speaks from the node's own address, so that what happens to the node's network happens to it, and claims the
policy from the start: the servers that it speaks for have no weights.
"""

from __future__ import annotations

import http.client
import os
import secrets
import sys
import time
from urllib.parse import urlsplit

import msgspec

from policies.wire import Announce

ANSWER_S = 5.0
RETRY_S = 0.05
MAX_REQUESTS = 342  # three of them have 1,024 in flight


def announce(url: str, node: str, address: str, policy: str) -> None:
    """Announce the node, for ever, on one connection for as long as it holds."""
    said = msgspec.json.encode(Announce(secrets.token_hex(4), address, policy, MAX_REQUESTS))
    headers = {"Authorization": f"Bearer {os.environ['GRPO_ORCH_TOKEN']}"}
    gateway, source = urlsplit(url).netloc, address.rsplit(":", 1)[0]
    while True:
        connection = http.client.HTTPConnection(gateway, timeout=ANSWER_S, source_address=(source, 0))
        try:
            while True:
                connection.request("POST", f"/members/{node}", said, headers)
                connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            connection.close()
            time.sleep(RETRY_S)


if __name__ == "__main__":
    announce(*sys.argv[1:])
