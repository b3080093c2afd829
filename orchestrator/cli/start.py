"""Commands that start a run, or continue it: up, resume, rollback."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from checkpoint import journal
from checkpoint.records import documents
from checkpoint.records.documents import Lease, RunRecord
from checkpoint.store.document import Unreadable
from checkpoint.store.errors import AlreadyExists
from checkpoint.store.probe import probe
from checkpoint.store.run_store import Store
from checkpoint.stream.catalog import Catalog
from orchestrator.cli.checkpoints import find_checkpoint
from orchestrator.cli.look import attach
from orchestrator.cli.options import AsJson, Output, Stop, Target, console, print_json
from orchestrator.cli.prepare import count_gpus, print_notices
from orchestrator.cli.remote import controller_of, is_steered, refuse_unknown_machines, start_remote
from orchestrator.cli.target import keep_options, open_run, open_store, record_of, storage_of
from orchestrator.clouds import open_cloud
from orchestrator.clouds.local import node_python
from orchestrator.clouds.protocol import Offer
from orchestrator.clouds.sky.remote import RemoteController
from orchestrator.config.load import ConfigError, load, load_storage
from orchestrator.config.model_size import find_size
from orchestrator.control.launcher import TakenByAnother, start_daemon, start_rehearsal
from orchestrator.home import (
    keep_run_digest,
    known_token,
    missing,
    notify_urls,
    remember_run,
    run_digest,
    run_id_of,
    run_token,
    token_file,
    token_mark,
)
from orchestrator.notify.channels import EXPECTED_SERVICE_URL, is_service_url
from orchestrator.plan.gather import make_plan
from orchestrator.plan.machines import FindSize, asked_once
from orchestrator.plan.prices import by_offers
from orchestrator.views.plan import render_short
from policies.control.rollback.begin import NAME_A_TARGET, RUN_START, WHOLE_NUMBER_KEYS, target_by_hand
from policies.fleet.budget import BUDGET
from policies.model import exit_codes
from policies.model.loss import effects
from policies.model.spec import RunSpec, processes_of
from policies.model.state import Rollback, RunState
from policies.model.timelines import Fork, forked_spec
from policies.model.vocabulary import Market, PolicyVersion, RunPhase

# The keys that a restarted trainer can take over, as they change no shape: the least that each may be, and whether
# it must be more.
CHANGEABLE: dict[str, tuple[float, bool]] = {
    "beta": (0.0, False),
    "epsilon": (0.0, True),
    "epsilon_high": (0.0, True),
    "learning_rate": (0.0, True),
    "max_grad_norm": (0.0, True),
    "temperature": (0.0, True),
    "max_completion_length": (1.0, False),
    "max_steps": (1.0, False),
}
TAKEN_S = 60.0  # how long the daemon may take to begin
POLL_S = 0.2


def rollback(
    target: Target = None,
    to: Annotated[
        str | None,
        typer.Option(help="TIMELINE-STEP, a step, `latest` or `start`; default: before what has gone wrong."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=NUMBER", help="Change a key of grpo; default: by policies.kl.on_rollback."
        ),
    ] = None,
    output: AsJson = Output.TEXT,
) -> None:
    """Go back to a checkpoint and on from there on a new timeline, with something changed."""
    wanted = dict(read_change(text) for text in changes or [])
    store, record = open_run(target)
    if not is_steered(store):
        refuse_missing_secrets(record.spec)
    state = journal.recover(store).state
    if state.phase is RunPhase.STOPPING:
        raise Stop(f"{record.spec.name} is stopping; wait for its end", exit_codes.USAGE)
    if state.phase is RunPhase.FINISHED and "max_steps" not in wanted:
        raise Stop(f"{record.spec.name} is finished; {more_steps(store, record.spec)}", exit_codes.USAGE)
    start = _start_version(store, to)
    _refuse_reached_steps(wanted, start)
    if start is None:
        _refuse_without_target(store, state)
    controller = controller_of(record, store)
    command = documents.send_command(store, "rollback", time.time(), start=start, changes=wanted)
    if not is_steered(store):
        if controller is not None:
            start_remote(controller, store, "rollback")
        else:
            with contextlib.suppress(TakenByAnother):  # which has the command, too
                start_daemon(store, record, "rollback")
    begun = _begun(store, command.command_id, state.rollbacks[-1:])
    grpo = forked_spec(record.spec, state.forks[-1] if state.forks else None).grpo
    does = effects(_new_changes(begun.fork, grpo), grpo, processes_of(record.spec))
    if output is Output.JSON:
        print_json({**_plain(begun), "effects": does})
    else:
        fork = begun.fork
        changed = ", ".join(f"{key} {value:g}" for key, value in fork.changes.items()) or "the seeds alone"
        console.print(
            f"{record.spec.name} goes back to {fork.start or 'its start'}, as timeline {fork.timeline}; "
            f"changed from run.yaml: {changed}.",
            highlight=False,
            soft_wrap=True,
        )
        for key, text in does.items():
            console.print(f"{key}: {text}", highlight=False, soft_wrap=True)
        if state.phase is RunPhase.PARKED:
            console.print(
                "It is parked: the new timeline is trained once a rollout node can be had.", soft_wrap=True
            )


def refuse_missing_secrets(spec: RunSpec) -> None:
    """Raise Stop when the environment lacks a secret that the nodes need."""
    if wrong := missing(spec, os.environ):
        raise Stop(f"{wrong}; export or remove it", exit_codes.USAGE)


def _new_changes(fork: Fork, grpo: Mapping[str, Any]) -> dict[str, float]:
    """What a fork changed, beyond its predecessors."""
    return {key: value for key, value in fork.changes.items() if grpo.get(key) != value}


def more_steps(store: Store, spec: RunSpec) -> str:
    """Say how a finished run is trained further."""
    steps = int(spec.grpo.get("max_steps", -1))
    example = 2 * steps if steps > 0 else "N"
    return f"train it further with: grpo-orch resume {store.quoted} --set max_steps={example}"


def _refuse_reached_steps(changes: Mapping[str, float], start: str | None) -> None:
    """Raise Stop where no step would be left to train."""
    steps = changes.get("max_steps")
    reached = 0 if start in (None, RUN_START) else PolicyVersion.parse(start).step
    if steps is not None and steps <= reached:
        message = f"--set max_steps={steps:g}: the checkpoint has reached step {reached}; expected more"
        raise Stop(message, exit_codes.USAGE)


def read_change(text: str) -> tuple[str, float]:
    """`beta=0.08` as key and value. Raises Stop."""
    key, _, number = text.partition("=")
    if key not in CHANGEABLE:
        raise Stop(f"--set {text}: expected KEY=NUMBER, KEY one of {', '.join(CHANGEABLE)}", exit_codes.USAGE)
    least, more = CHANGEABLE[key]
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < least or (more and value == least):
        bound = f"above {least:g}" if more else f"of {least:g} or more"
        raise Stop(f"--set {text}: expected a number {bound}, as in {key}=0.1", exit_codes.USAGE)
    if key in WHOLE_NUMBER_KEYS and not value.is_integer():
        raise Stop(f"--set {text}: expected a whole number, as in {key}=256", exit_codes.USAGE)
    return key, value


def _start_version(store: Store, to: str | None) -> str | None:
    """The version that a word means, RUN_START, or None where nothing is said. Raises Stop."""
    if to is None or to == RUN_START:
        return to
    if to in ("0", "0-0"):
        return RUN_START
    return find_checkpoint(Catalog(store, "rollback").newest().checkpoints, to).version


def _refuse_without_target(store: Store, state: RunState) -> None:
    """Raise Stop where the policy finds nothing to go back to, and a person must name it."""
    present = Catalog(store, "rollback").newest()
    target = target_by_hand(state, [one.at for one in present.checkpoints], ever_stored=present.number > 0)
    if target.missing:
        raise Stop(f"{target.missing}; {NAME_A_TARGET}", exit_codes.USAGE)


def _begun(store: Store, command_id: str, before: tuple[Rollback, ...]) -> Rollback:
    """Return the rollback that the daemon begins upon the command. Raises Stop."""
    deadline_s = time.monotonic() + TAKEN_S
    with console.status("waiting for the daemon"):
        while time.monotonic() < deadline_s:
            state: RunState = journal.recover(store).state
            if command_id in state.commands_taken:
                last = state.rollbacks[-1:]
                if last and [one.fork for one in last] != [one.fork for one in before]:
                    return last[0]
                why = f"but the run is {state.phase}, and no rollback was begun; see `grpo-orch events`"
                raise Stop(f"the daemon took the command, {why}", exit_codes.FAILED)
            time.sleep(POLL_S)
    hint = "it stays in the store and is carried out by `grpo-orch resume`"
    raise Stop(f"the daemon did not take the command within {TAKEN_S:.0f} s; {hint}", exit_codes.FAILED)


def _plain(begun: Rollback) -> dict[str, object]:
    fork = begun.fork
    return {"timeline": fork.timeline, "start": fork.start, "changes": dict(fork.changes), "cause": begun.cause}


# up, resume

Detach = Annotated[bool, typer.Option("-d", "--detach", help="Do not attach the live view.")]
Remote = Annotated[
    bool, typer.Option("--remote", help="Steer it from a small machine of its own, so that this one may sleep.")
]

Web = Annotated[
    bool,
    typer.Option("--web", help="Serve the run page beside the daemon, on 127.0.0.1, for as long as it lives."),
]
WebPort = Annotated[
    int | None,
    typer.Option("--web-port", min=1, max=65535, help="For --web; default: 8642, or another that is free."),
]


def up(
    run_yaml: Annotated[Path, typer.Argument(help="The run's specification.")] = Path("run.yaml"),
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Start without asking.")] = False,
    detach: Detach = False,
    remote: Remote = False,
    web: Web = False,
    web_port: WebPort = None,
) -> None:
    """Start a run: check it, show what will be started, start its daemon, watch."""
    page = _page_socket(web or web_port is not None, web_port, remote)
    sizes = asked_once(find_size)
    loaded = load(run_yaml, count_gpus, sizes)
    spec = loaded.spec
    storage = load_storage(run_yaml)
    refuse_missing_secrets(spec)
    check_notify_urls(spec)
    store = open_store(storage)
    record = RunRecord(documents.SCHEMA, run_id_of(spec.name, store.url), time.time(), spec)
    _refuse_existing(store)
    controller = controller_of(record, store, wanted=remote)
    if spec.cloud == "local":
        node_python()
    probe(store)
    show_plan(record, store, controller, sizes)
    print_notices(loaded)
    if not yes and not typer.confirm("Start?", default=True):
        raise Stop("nothing was started", exit_codes.OK)
    try:
        keep_run_digest(store.url, run_digest(documents.create_run(store, record)))
    except AlreadyExists:
        _refuse_existing(store)
        raise
    keep_options(storage)
    _start(store, record, "up", detach, controller, page)


def check_notify_urls(spec: RunSpec) -> None:
    """Report variables of `notify.url_env` that are not set. Raises Stop for a URL that apprise cannot use."""
    urls = notify_urls(spec, os.environ)
    for name in spec.notify.url_env:
        if name not in urls:
            console.print(f"{name} is not set: no notifications will be sent to it", highlight=False)
        elif not is_service_url(urls[name]):
            raise Stop(f"{name}: {EXPECTED_SERVICE_URL}", exit_codes.USAGE)


def resume(
    target: Target = None,
    detach: Detach = False,
    remote: Remote = False,
    budget_usd: Annotated[
        float | None, typer.Option("--budget-usd", min=0, help="Another `budget.usd` for the run, from now on.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=NUMBER",
            help="Continue from the newest checkpoint with a key of grpo changed, such as max_steps.",
        ),
    ] = None,
    web: Web = False,
    web_port: WebPort = None,
) -> None:
    """Resume a run after anything: its daemon or machines are gone, it was stopped, or it needs more steps."""
    if budget_usd is not None and not math.isfinite(budget_usd):
        raise Stop(f"--budget-usd {budget_usd}: expected a number of USD, as in 500", exit_codes.USAGE)
    storage = storage_of(target)
    store = open_store(storage)
    record = record_of(store)
    _refuse_held(store)
    state = _state(store)
    changes = [*(changes or []), *_changed_steps(target, record.spec, changes)]
    if changes:
        rollback(target, to="latest", changes=changes)
        if not detach:
            attach(store)
        return
    page = _page_socket(web or web_port is not None, web_port, remote)
    if state.phase is RunPhase.FINISHED and not state.nodes:
        raise Stop(
            f"{record.spec.name} is finished; see it with `grpo-orch report {store.quoted}`, or "
            f"{more_steps(store, record.spec)}",
            exit_codes.OK,
        )
    ended_diverged = state.phase in (RunPhase.PAUSED, RunPhase.GAVE_UP) and not state.money.is_reached
    if ended_diverged and not state.nodes and state.exported == state.healthy:
        raise Stop(
            f"{record.spec.name} {state.reason}; it goes on from an earlier checkpoint, with something changed: "
            f"grpo-orch rollback {store.quoted}",
            exit_codes.USAGE,
        )
    refuse_missing_secrets(record.spec)
    check_notify_urls(record.spec)
    controller = controller_of(record, store, wanted=remote)
    if controller is not None:
        refuse_unknown_machines(controller, store, sorted(state.nodes))
    elif record.spec.cloud != "local":
        _refuse_other_secret(store, record, sorted(state.nodes))
    probe(store)
    keep_options(storage)
    if budget_usd is not None:
        documents.send_command(store, BUDGET, time.time(), changes={"usd": budget_usd})
    _start(store, record, "resume", detach, controller, page)


def _changed_steps(target: str | None, own: RunSpec, changes: list[str] | None) -> list[str]:
    """Return the change of `max_steps` that the run.yaml named as target asks for.

    Raises Stop for a run.yaml that differs from the run's own in anything else, which names each key.
    """
    file = Path(target or "run.yaml")
    if file.suffix not in (".yaml", ".yml") or not file.is_file():
        return []
    try:
        wanted = load(file).spec
    except ConfigError:
        return []  # the run has its own copy, and no longer needs the file
    differs = changed_keys(own, wanted)
    steps = differs.pop("grpo.max_steps", None)
    if differs:
        keys = "; ".join(f"{key}: {now} there, {then} in the run" for key, (then, now) in sorted(differs.items()))
        raise Stop(
            f"{file} differs from the run's own copy, which resume uses ({keys}). "
            f"Undo that, start a new run with another `storage:`, or name the run by its store. "
            f"Of grpo, `--set` changes {', '.join(CHANGEABLE)}",
            exit_codes.USAGE,
        )
    named = {change.partition("=")[0] for change in changes or []}
    return [] if steps is None or "max_steps" in named else [f"max_steps={steps[1]}"]


# What a run trains with; the rest of run.yaml says where and how.
_COMPARED = ("grpo", "trainer", "rollout", "policies", "checkpoints")
_NOT_COMPARED = ("resources", "env", "setup")


def changed_keys(own: RunSpec, wanted: RunSpec) -> dict[str, tuple[object, object]]:
    """Return the value in the run and the wanted one of each key that differs and that training depends on."""
    before, after = (_leaves(msgspec.to_builtins(spec)) for spec in (own, wanted))
    keys = [key for key in before.keys() | after.keys() if key.split(".")[0] in _COMPARED]
    keys = [key for key in keys if not set(_NOT_COMPARED) & set(key.split("."))]
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def _leaves(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in section.items():
        name = f"{prefix}{key}"
        found |= _leaves(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


def _page_socket(wanted: bool, port: int | None, remote: bool) -> socket.socket | None:
    """Listen for the run page before anything is started. Raises Stop."""
    if not wanted:
        return None
    if remote:
        raise Stop("with --remote the daemon is elsewhere: look with `grpo-orch web` from here", exit_codes.USAGE)
    from orchestrator.web.server import HERE, listen  # no other start needs what it imports

    try:
        return listen(port)
    except OSError as error:
        raise Stop(
            f"--web-port {port}: cannot listen on {HERE}: {error.strerror or error}", exit_codes.USAGE
        ) from None


def _start(
    store: Store,
    record: RunRecord,
    reason: str,
    detach: bool,
    controller: RemoteController | None,
    page: socket.socket | None,
) -> None:
    remember_run(store.url)
    try:
        if controller is not None:
            start_remote(controller, store, reason)
            by = f"{controller.cluster}, which goes with `grpo-orch down {store.quoted}` and not before"
        else:
            run_token(record.run_id)
            by = f"pid {start_daemon(store, record, reason, page)}"
            start_rehearsal(store, record)
    except TakenByAnother:
        _refuse_held(store)
        raise
    except KeyboardInterrupt:  # which a daemon does not hear
        shows, ends = f"`grpo-orch status -w {store.quoted}` shows it", f"`grpo-orch down {store.quoted}` ends it"
        told = f"{record.spec.name} is begun, and goes on by itself; {shows}, {ends}"
        raise Stop(told, exit_codes.FAILED) from None
    console.print(f"{record.spec.name} is steered by {by}.", highlight=False, soft_wrap=True)
    if page is not None:
        host, port = page.getsockname()
        page.close()  # the daemon has it
        console.print(f"Its page: http://{host}:{port}/", highlight=False, soft_wrap=True)
    if detach:
        console.print(f"Watch it with: grpo-orch status -w {store.quoted}", highlight=False, soft_wrap=True)
        return
    attach(store)


def _refuse_existing(store: Store) -> None:
    """Raise Stop when the store holds a run already."""
    _refuse_held(store)
    if store.get_or_none("run.json") is not None:
        raise Stop(
            f"{store.url} holds a run already; continue it with `grpo-orch resume {store.quoted}`, "
            "or name another `storage:`",
            exit_codes.USAGE,
        )


def _refuse_held(store: Store) -> None:
    if is_steered(store) and (lease := documents.LEASE.read(store, Unreadable())):
        raise Stop(_held(store, lease), exit_codes.HELD)


def _refuse_other_secret(store: Store, record: RunRecord, nodes: list[str]) -> None:
    """Raise Stop when machines are up that would not speak with any that is launched from here."""
    mark, token = documents.SECRET_MARK.read(store), known_token(record.run_id)
    if nodes and mark is not None and (token is None or mark != token_mark(token)):
        raise Stop(
            f"{', '.join(nodes)} hold a secret that this machine has not: bring {token_file(record.run_id)} from "
            f"where they were launched, or return them first with `grpo-orch down {store.quoted}`",
            exit_codes.FAILED,
        )


def _held(store: Store, lease: Lease) -> str:
    return (
        f"{store.url} is steered by pid {lease.pid} on {lease.host} (epoch {lease.epoch}); "
        f"watch it with `grpo-orch status -w {store.quoted}`, stop it with `grpo-orch down {store.quoted}`"
    )


def _state(store: Store) -> RunState:
    return journal.recover(store).state


def show_plan(
    record: RunRecord,
    store: Store,
    controller: RemoteController | None,
    find_size: FindSize,
    terminal: Console = console,
) -> None:
    """Print what will be started, what it takes, and what it costs; of an evaluation not what a step takes."""
    spec: RunSpec = record.spec
    cloud = open_cloud(record, store)
    offers = cloud.offers()
    table = Table("node", "market", "what", "USD/h", title=f"{spec.name} on {spec.cloud}", title_justify="left")
    for offer in offers:
        table.add_row(offer.role, offer.market, _what(offer), f"{offer.price_usd_per_h:.2f}")
    beside = 0.0
    if controller is not None:
        best = controller.offer()
        beside = best.price_usd_per_h
        table.add_row("controller", Market.ON_DEMAND, f"{best.infra} {best.instance_type}", f"{beside:.2f}")
    plan = make_plan(spec, find_size, by_offers(offers, beside))
    table.add_section()
    table.add_row("all", "", f"store {spec.storage}", f"{plan.most_usd_per_h or 0:.2f}")
    terminal.print(table)
    if record.evaluation is None:
        terminal.print(render_short(plan), highlight=False)
    for line in cloud.without_quota():
        terminal.print(line, highlight=False, soft_wrap=True)


def _what(offer: Offer) -> str:
    if offer.other_market_usd_per_h is None:
        return offer.description
    return f"{offer.description} ({offer.market.other} {offer.other_market_usd_per_h:.2f})"
