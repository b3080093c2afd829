"""One member of the gateway, as a node's agent would announce it.

The arguments are URL NODE ADDRESS POLICY [LOAD_S].

It speaks from the node's own address, so that what happens to the node's network happens to it, and claims the
policy from the start: the servers that it speaks for have no weights. With LOAD_S it claims whatever is wanted of
it, so long after it has heard of it.
"""

from __future__ import annotations

import http.client
import os
import secrets
import sys
import time
from urllib.parse import urlsplit

import msgspec

from grpo_orch.policies.serving.wire import HOLD_S, Announce, AnnounceReply

ANSWER_S = 5.0
RETRY_S = 0.05
MAX_REQUESTS = 342  # three of them have 1,024 in flight


def announce(url: str, node: str, address: str, policy: str, load_s: str = "") -> None:
    """Announce the node, for ever, on one connection for as long as it holds."""
    boot_id, wanted, ready_s = secrets.token_hex(4), policy, 0.0
    headers = {"Authorization": f"Bearer {os.environ['GRPO_ORCH_TOKEN']}"}
    gateway, source = urlsplit(url).netloc, address.rsplit(":", 1)[0]
    while True:
        connection = http.client.HTTPConnection(gateway, timeout=ANSWER_S, source_address=(source, 0))
        try:
            while True:
                if wanted != policy and ready_s - time.monotonic() < HOLD_S:
                    time.sleep(max(0.0, ready_s - time.monotonic()))  # its word would be held for longer
                    policy = wanted
                said = msgspec.json.encode(Announce(boot_id, address, policy, MAX_REQUESTS))
                connection.request("POST", f"/members/{node}", said, headers)
                reply = msgspec.json.decode(connection.getresponse().read(), type=AnnounceReply)
                if load_s and reply.policy is not None and reply.policy.label != wanted:
                    wanted, ready_s = reply.policy.label, time.monotonic() + float(load_s)
        except (OSError, http.client.HTTPException, msgspec.DecodeError):
            connection.close()
            time.sleep(RETRY_S)


if __name__ == "__main__":
    announce(*sys.argv[1:])
