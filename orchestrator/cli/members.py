"""Commands for a run's rollout nodes as its gateway has them: ls, drain, remove."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import httpx
import typer
from rich.table import Table

from checkpoint.records import documents
from checkpoint.security import identity
from checkpoint.store.run_store import Store
from orchestrator.cli.options import AsJson, Output, Stop, Target, console, print_json
from orchestrator.cli.target import open_run
from orchestrator.control.observe import GatewayWatch
from orchestrator.gateway.surface.describe import describe
from orchestrator.home import known_token
from orchestrator.views.words import NOT_KNOWN, duration
from policies.model import exit_codes
from policies.model.vocabulary import machine_of

TIMEOUT_S = 5.0  # a person waits

app = typer.Typer(name="members", help="List, drain and remove the gateway's members.", no_args_is_help=True)
Node = Annotated[str, typer.Argument(help="A rollout node, or one engine of it, as `members ls` names it.")]


@app.command()
def ls(target: Target = None, output: AsJson = Output.TEXT) -> None:
    """List the members as the gateway last wrote them to the store."""
    store, _ = open_run(target)
    status = GatewayWatch(store, believe_first=True).look()
    found = [] if status is None else describe(status.members, status.changes, status.policy)
    if output is Output.JSON:
        print_json([asdict(one) for one in found])
        return
    if not found:
        console.print("no gateway has written its members yet" if status is None else "no member")
        return
    table = Table("node", "state", "policy", "requests", "heard", "last change", box=None, pad_edge=False)
    for one in found:
        policy = one.policy.partition("@")[0] if one.policy else NOT_KNOWN
        heard = f"{duration(one.seen_s_ago)} ago"
        table.add_row(one.node, one.state, policy, str(one.requests_running), heard, one.reason)
    console.print(table)


@app.command()
def drain(node: Node, target: Target = None, output: AsJson = Output.TEXT) -> None:
    """Send the node nothing new; it leaves once its requests are finished."""
    store, record = open_run(target)
    with _Gateway(store, record.run_id) as gateway:
        running = gateway.running_on(node)
        gateway.ask("POST", f"/members/{node}/drain")
    _say(node, "draining", f"{node} drains, {running} requests running", output)


@app.command()
def remove(node: Node, target: Target = None, output: AsJson = Output.TEXT) -> None:
    """Take the node out at once: its requests go on elsewhere, and this boot of it does not come back."""
    store, record = open_run(target)
    with _Gateway(store, record.run_id) as gateway:
        running = gateway.running_on(node)
        gateway.ask("DELETE", f"/members/{node}")
    _say(node, "removed", f"{node} is out, {running} requests go on elsewhere", output)


class _Gateway:
    """The run's gateway, at the address in the store. Raises Stop when it does not do as it is told."""

    def __init__(self, store: Store, run_id: str) -> None:
        address, token = documents.read_gateway(store), known_token(run_id)
        if address is None:
            raise Stop("no gateway yet: the run's trainer starts it", exit_codes.FAILED)
        if token is None:
            raise Stop(
                "this machine does not have the run's secret; ask where its daemon runs",
                exit_codes.FAILED,
            )
        self._url = address.url
        self._http = httpx.Client(
            base_url=address.url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=TIMEOUT_S,
            trust_env=False,
            verify=identity.client_context(token),
        )

    def __enter__(self) -> _Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def running_on(self, node: str) -> int:
        """Requests on the member of that name, or on all of a machine's."""
        members: list[dict[str, Any]] = self.ask("GET", "/members").json()["members"]
        running = {member["node"]: int(member["requests_running"]) for member in members}
        found = [count for name, count in running.items() if node in (name, machine_of(name))]
        if not found:
            raise Stop(f"no member {node!r}; there are: {', '.join(running) or 'none'}", exit_codes.USAGE)
        return sum(found)

    def ask(self, method: str, path: str) -> httpx.Response:
        try:
            response = self._http.request(method, path)
        except httpx.HTTPError as error:
            reason = f"{self._url}: {str(error) or type(error).__name__}"
            raise Stop(f"the gateway cannot be reached from here ({reason})", exit_codes.FAILED) from None
        if response.is_error:
            said = response.text.strip() or "no more was said"
            raise Stop(f"the gateway answered {response.status_code}: {said}", exit_codes.FAILED)
        return response


def _say(node: str, state: str, text: str, output: Output) -> None:
    if output is Output.JSON:
        print_json({"node": node, "state": state})
    else:
        console.print(text, highlight=False, soft_wrap=True)
