"""Commands for the members of a run: ls, drain, remove."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import httpx
import typer

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.security import identity
from grpo_orch.orchestrator.cli.options import AsJson, Output, Stop, Target, print_result
from grpo_orch.orchestrator.cli.target import open_run
from grpo_orch.orchestrator.control.observe import GatewayWatch
from grpo_orch.orchestrator.home import known_token
from grpo_orch.orchestrator.views.formatting import UNKNOWN_TEXT, duration, plain_table
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.vocabulary import machine_of
from grpo_orch.policies.serving.gateway_status import describe

TIMEOUT_S = 5.0  # short, because a person waits

app = typer.Typer(name="members", help="List, drain and remove the gateway's members.", no_args_is_help=True)
Node = Annotated[str, typer.Argument(help="A rollout node or an engine of it, named as in `members ls`.")]


@app.command()
def ls(target: Target = None, output: AsJson = Output.TEXT) -> None:
    """List the members, as the gateway last wrote them to the store."""
    store, _ = open_run(target)
    status = GatewayWatch(store, trust_first=True).observe()
    members = [] if status is None else describe(status.members, status.changes, status.policy)
    missing = "the gateway has not written its members yet" if status is None else "no members"
    table = plain_table("node", "state", "policy", "requests", "last seen", "last change")
    for member in members:
        policy = member.policy.partition("@")[0] if member.policy else UNKNOWN_TEXT
        seen = f"{duration(member.seen_s_ago)} ago"
        table.add_row(member.node, member.state, policy, str(member.requests_running), seen, member.reason)
    print_result(output, [asdict(member) for member in members], table if members else missing)


@app.command()
def drain(node: Node, target: Target = None, output: AsJson = Output.TEXT) -> None:
    """Send the node no new requests; it leaves after its running requests finish."""
    running = _change(target, node, "POST", f"/members/{node}/drain")
    text = f"{node} is draining, {running} requests running"
    print_result(output, {"node": node, "state": "draining"}, text)


@app.command()
def remove(node: Node, target: Target = None, output: AsJson = Output.TEXT) -> None:
    """Remove the node immediately: its requests continue elsewhere, and its machine cannot rejoin."""
    running = _change(target, node, "DELETE", f"/members/{node}")
    text = f"{node} is removed, {running} requests continue elsewhere"
    print_result(output, {"node": node, "state": "removed"}, text)


def _change(target: str | None, node: str, method: str, path: str) -> int:
    """Send a request about a member, or all members of a machine, to the run's gateway; raise Stop if it fails.

    Return the number of requests that run on them.
    """
    store, record = open_run(target)
    address, token = documents.read_gateway(store), known_token(record.run_id)
    if address is None:
        raise Stop("no gateway yet: the run's trainer starts it", exit_codes.FAILED)
    if token is None:
        raise Stop(
            "this machine does not have the run's secret; run the command where the daemon runs", exit_codes.FAILED
        )
    with httpx.Client(
        base_url=address.url,
        headers={"Authorization": f"Bearer {token}"},
        timeout=TIMEOUT_S,
        trust_env=False,
        verify=identity.client_context(token),
    ) as http:
        members: list[dict[str, Any]] = _request(http, "GET", "/members").json()["members"]
        running = {member["node"]: int(member["requests_running"]) for member in members}
        counts = [count for name, count in running.items() if node in (name, machine_of(name))]
        if not counts:
            raise Stop(f"no member {node!r}; members: {', '.join(running) or 'none'}")
        _request(http, method, path)
    return sum(counts)


def _request(http: httpx.Client, method: str, path: str) -> httpx.Response:
    """Send a request and return its response. Raises Stop."""
    try:
        response = http.request(method, path)
    except httpx.HTTPError as error:
        reason = f"{http.base_url}: {str(error) or type(error).__name__}"
        raise Stop(f"the gateway is unreachable from here ({reason})", exit_codes.FAILED) from None
    if response.is_error:
        details = response.text.strip() or "no details"
        raise Stop(f"the gateway returned {response.status_code}: {details}", exit_codes.FAILED)
    return response
