"""One look at the world: cloud, gateway, trainer, commands. A party that does not answer is None, never empty."""

from __future__ import annotations

import httpx
import msgspec

from checkpoint import documents
from checkpoint.store import Store
from orchestrator.clouds.protocol import Cloud, CloudUnavailable
from policies.snapshot import LaunchRefused, Machine, Member, Snapshot
from policies.wire import GatewayStatus, MemberStatus

GATEWAY_TIMEOUT_S = 1.0


class Observer:
    """Looks. Keeps one HTTP connection to the gateway."""

    def __init__(self, store: Store, cloud: Cloud, token: str) -> None:
        self._store = store
        self._cloud = cloud
        self._http = httpx.Client(timeout=GATEWAY_TIMEOUT_S, headers={"Authorization": f"Bearer {token}"})

    def look(self, now_s: float, refused: tuple[LaunchRefused, ...]) -> Snapshot:
        """Return what is there now. Raises StoreError when the store cannot be read."""
        status, age_s = self._gateway(now_s)
        return Snapshot(
            now_s=now_s,
            machines=self._machines(),
            members=None if status is None else {m.node: _member(m) for m in status.members},
            gateway_boot_id=None if status is None else status.boot_id,
            gateway_age_s=age_s,
            trainer=documents.read_trainer(self._store),
            refused=refused,
            commands=documents.read_commands(self._store),
        )

    def _machines(self) -> dict[str, Machine] | None:
        try:
            return self._cloud.machines()
        except CloudUnavailable:
            return None

    def _gateway(self, now_s: float) -> tuple[GatewayStatus | None, float]:
        address = documents.read_gateway(self._store)
        if address is None:
            return None, 0.0
        return ask_gateway(self._http, address.url), now_s - address.started_at_s


def ask_gateway(http: httpx.Client, url: str) -> GatewayStatus | None:
    """Return the gateway's status, or None when it does not answer as one."""
    try:
        answer = http.get(f"{url}/status")
        answer.raise_for_status()
        return msgspec.json.decode(answer.content, type=GatewayStatus)
    except (httpx.HTTPError, msgspec.DecodeError):
        return None


def _member(status: MemberStatus) -> Member:
    return Member(status.node, status.boot_id, status.policy, status.serving, status.requests_running)
