"""The command that shows a run in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from checkpoint.records.documents import RunRecord
from checkpoint.security import identity
from orchestrator.cli.options import AsJson, Output, Stop, Target, console, print_json
from orchestrator.cli.target import open_run
from orchestrator.home import known_token, token_file
from policies.model import exit_codes


def web(
    target: Target = None,
    host: Annotated[
        str,
        typer.Option("--host", help="Address to listen on; any but this machine's own asks for the run's secret."),
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Default: 8642, or another that is free.")
    ] = None,
    output: AsJson = Output.TEXT,
) -> None:
    """Show a run in a browser, live, from wherever its store can be read; Ctrl-C ends it."""
    from orchestrator.web.access import fingerprint  # no other command needs what these import
    from orchestrator.web.server import serve

    store, record = open_run(target)
    secret = _secret(record, host) if identity.protects(host) else None

    def tell(url: str) -> None:
        if output is Output.JSON:
            print_json({"url": url, "fingerprint": None if secret is None else fingerprint(secret)})
            return
        asks = f" (asks for the secret in {token_file(record.run_id)}; {fingerprint(secret)})" if secret else ""
        console.print(f"{record.spec.name}: {url}{asks}", highlight=False, soft_wrap=True)

    try:
        serve(store, host, port, secret, tell)
    except OSError as error:
        raise Stop(f"cannot listen on {host}: {error.strerror or error}", exit_codes.USAGE) from None


def _secret(record: RunRecord, host: str) -> str:
    """Raises Stop where this machine does not have it."""
    token = known_token(record.run_id)
    if token is None:
        hint = f"bring {token_file(record.run_id)} from where the run was started, or look through `ssh -L`"
        raise Stop(
            f"on {host} the page asks for the run's secret, which this machine has not: {hint}", exit_codes.USAGE
        )
    return token
