"""Commands that start or continue a run: up, resume, rollback."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.checkpoint.store.errors import AlreadyExists
from grpo_orch.checkpoint.store.probe import probe
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.orchestrator.cli.checkpoints import NEWEST, find_checkpoint
from grpo_orch.orchestrator.cli.look import attach
from grpo_orch.orchestrator.cli.options import (
    AsJson,
    Output,
    Stop,
    Target,
    Yes,
    confirm,
    console,
    errors,
    print_json,
    print_line,
    print_result,
    require_terminal,
    text_terminal,
)
from grpo_orch.orchestrator.cli.prepare import count_gpus, print_notices
from grpo_orch.orchestrator.cli.remote import controller_of, has_daemon, refuse_unknown_machines, start_remote
from grpo_orch.orchestrator.cli.target import keep_options, open_run, open_store, record_of, storage_of
from grpo_orch.orchestrator.clouds import open_cloud
from grpo_orch.orchestrator.clouds.local import node_python
from grpo_orch.orchestrator.clouds.protocol import Offer
from grpo_orch.orchestrator.clouds.sky.remote_controller import RemoteController
from grpo_orch.orchestrator.config.load import ConfigError, load, load_storage
from grpo_orch.orchestrator.config.model_size import find_size
from grpo_orch.orchestrator.control.launcher import AlreadyControlled, start_daemon, start_rehearsal
from grpo_orch.orchestrator.home import (
    known_token,
    missing_secrets,
    notify_urls,
    remember_run,
    run_digest,
    run_id_of,
    run_token,
    save_run_digest,
    token_file,
    token_mark,
)
from grpo_orch.orchestrator.notify import EXPECTED_SERVICE_URL, is_service_url
from grpo_orch.orchestrator.plan.gather import make_plan
from grpo_orch.orchestrator.plan.machines import FindSize, cached_lookup
from grpo_orch.orchestrator.plan.prices import by_offers
from grpo_orch.orchestrator.views.plan import render_short
from grpo_orch.policies.control.rollback import RUN_START, TARGET_HINT, WHOLE_NUMBER_KEYS, user_target
from grpo_orch.policies.fleet.budget import BUDGET
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.loss import effects
from grpo_orch.policies.model.spec import RunSpec, processes_of
from grpo_orch.policies.model.state import Rollback, RunState
from grpo_orch.policies.model.timelines import Fork, forked_spec
from grpo_orch.policies.model.vocabulary import Market, PolicyVersion, RunPhase

# Keys that a restarted trainer can change, because they change no shape: the lower bound, and whether it is
# exclusive.
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
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=NUMBER",
        help="Change a key of grpo, such as max_steps. May be repeated.",
        autocompletion=lambda: [f"{key}=" for key in CHANGEABLE],
    ),
]
TAKEN_S = 60.0  # time limit for the daemon to take a command
POLL_S = 0.2


def rollback(
    target: Target = None,
    to: Annotated[
        str | None,
        typer.Option(
            help="TIMELINE-STEP, a step, `latest` or `start`. Default: the last checkpoint before the divergence.",
            autocompletion=lambda: [NEWEST, RUN_START],
        ),
    ] = None,
    changes: Changes = None,
    output: AsJson = Output.TEXT,
) -> None:
    """Roll back to a checkpoint and continue on a new timeline, with changed hyperparameters.

    Without --set, apply policies.kl.on_rollback.
    """
    wanted = dict(read_change(text) for text in changes or [])
    store, record = open_run(target)
    if not has_daemon(store):
        refuse_missing_secrets(record.spec)
    state = journal.recover(store).state
    if state.phase is RunPhase.STOPPING:
        raise Stop(f"{record.spec.name} is stopping; wait until it has stopped")
    if state.phase is RunPhase.FINISHED and "max_steps" not in wanted:
        raise Stop(f"{record.spec.name} is finished; {more_steps(store, record.spec)}")
    start = _start_version(store, to)
    _refuse_reached_steps(wanted, start)
    if start is None:
        _refuse_without_target(store, state)
    controller = controller_of(record, store)
    command = documents.send_command(store, "rollback", time.time(), start=start, changes=wanted)
    if not has_daemon(store):
        if controller is not None:
            start_remote(controller, store, "rollback")
        else:
            with contextlib.suppress(AlreadyControlled):  # the other daemon takes the command
                start_daemon(store, record, "rollback")
    started = _wait_for_rollback(store, command.command_id, state.rollbacks[-1:])
    grpo = forked_spec(record.spec, state.forks[-1] if state.forks else None).grpo
    texts = effects(_new_changes(started.fork, grpo), grpo, processes_of(record.spec))
    if output is Output.JSON:
        print_json({**_plain(started), "effects": texts})
    else:
        fork = started.fork
        changed = ", ".join(f"{key} {value:g}" for key, value in fork.changes.items()) or "only the seeds"
        print_line(
            f"{record.spec.name} rolls back to {fork.start or 'its start'}, as timeline {fork.timeline}; "
            f"changed from run.yaml: {changed}."
        )
        for key, text in texts.items():
            print_line(f"{key}: {text}")
        if state.phase is RunPhase.PARKED:
            print_line("The run is parked: training continues when a rollout node is available.")


def refuse_missing_secrets(spec: RunSpec) -> None:
    """Raise Stop if the environment lacks a secret that the nodes need."""
    if problem := missing_secrets(spec, os.environ):
        raise Stop(f"{problem}; export it or remove it from that list")


def _new_changes(fork: Fork, grpo: Mapping[str, Any]) -> dict[str, float]:
    """Return the changes that this fork added to those of its predecessors."""
    return {key: value for key, value in fork.changes.items() if grpo.get(key) != value}


def more_steps(store: Store, spec: RunSpec) -> str:
    """Return a hint how to train a finished run further."""
    steps = int(spec.grpo.get("max_steps", -1))
    example = 2 * steps if steps > 0 else "N"
    return f"train it further with: grpo-orch resume {store.quoted} --set max_steps={example}"


def _refuse_reached_steps(changes: Mapping[str, float], start: str | None) -> None:
    """Raise Stop if the changed max_steps leaves no step to train."""
    steps = changes.get("max_steps")
    reached = 0 if start in (None, RUN_START) else PolicyVersion.parse(start).step
    if steps is not None and steps <= reached:
        message = f"--set max_steps={steps:g}: the checkpoint is already at step {reached}; expected more"
        raise Stop(message)


def read_change(text: str) -> tuple[str, float]:
    """Parse `beta=0.08` as key and value. Raises Stop."""
    key, _, number = text.partition("=")
    if key not in CHANGEABLE:
        raise Stop(f"--set {text}: expected KEY=NUMBER, where KEY is one of {', '.join(CHANGEABLE)}")
    bound, is_exclusive = CHANGEABLE[key]
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < bound or (is_exclusive and value == bound):
        range_text = f"above {bound:g}" if is_exclusive else f"of {bound:g} or more"
        raise Stop(f"--set {text}: expected a number {range_text}, as in {key}=0.1")
    if key in WHOLE_NUMBER_KEYS and not value.is_integer():
        raise Stop(f"--set {text}: expected a whole number, as in {key}=256")
    return key, value


def _start_version(store: Store, to: str | None) -> str | None:
    """Return the version that `--to` names, RUN_START, or None without `--to`. Raises Stop."""
    if to is None or to == RUN_START:
        return to
    if to in ("0", "0-0"):
        return RUN_START
    return find_checkpoint(Catalog(store, "rollback").newest().checkpoints, to).version


def _refuse_without_target(store: Store, state: RunState) -> None:
    """Raise Stop if the policy finds no checkpoint to roll back to, so that the user must name one."""
    present = Catalog(store, "rollback").newest()
    versions = [checkpoint.at for checkpoint in present.checkpoints]
    target = user_target(state, versions, ever_stored=present.number > 0)
    if target.missing:
        raise Stop(f"{target.missing}; {TARGET_HINT}")


def _wait_for_rollback(store: Store, command_id: str, before: tuple[Rollback, ...]) -> Rollback:
    """Wait for the daemon to take the command, and return the rollback that it starts. Raises Stop."""
    deadline_s = time.monotonic() + TAKEN_S
    with errors.status("waiting for the daemon"):
        while time.monotonic() < deadline_s:
            state: RunState = journal.recover(store).state
            if command_id in state.commands_taken:
                last = state.rollbacks[-1:]
                if last and [rollback.fork for rollback in last] != [rollback.fork for rollback in before]:
                    return last[0]
                why = f"but the run is {state.phase} and no rollback has started; see `grpo-orch events`"
                raise Stop(f"the daemon took the command, {why}", exit_codes.FAILED)
            time.sleep(POLL_S)
    hint = "the command stays in the store, and `grpo-orch resume` executes it"
    raise Stop(f"the daemon did not take the command within {TAKEN_S:.0f} s; {hint}", exit_codes.FAILED)


def _plain(started: Rollback) -> dict[str, object]:
    fork = started.fork
    return {"timeline": fork.timeline, "start": fork.start, "changes": dict(fork.changes), "cause": started.cause}


# up, resume

Detach = Annotated[bool, typer.Option("-d", "--detach", help="Do not attach the live view.")]
Remote = Annotated[
    bool,
    typer.Option("--remote", help="Run the daemon on a small cloud VM, so you can close this laptop."),
]


def up(
    run_yaml: Annotated[Path, typer.Argument(help="The run's specification.")] = Path("run.yaml"),
    yes: Yes = False,
    detach: Detach = False,
    remote: Remote = False,
    output: AsJson = Output.TEXT,
) -> None:
    """Start a run: check run.yaml, print the plan and its cost, start the daemon, and watch."""
    terminal = text_terminal(output)
    sizes = cached_lookup(find_size)
    loaded = load(run_yaml, count_gpus, sizes)
    require_terminal(yes)
    spec = loaded.spec
    storage = load_storage(run_yaml)
    refuse_missing_secrets(spec)
    check_notify_urls(spec, terminal)
    store = open_store(storage)
    record = RunRecord(documents.SCHEMA, run_id_of(spec.name, store.url), time.time(), spec)
    _refuse_existing(store)
    controller = controller_of(record, store, wanted=remote)
    if spec.cloud == "local":
        node_python()
    probe(store)
    show_plan(record, store, controller, sizes, terminal)
    print_notices(loaded, terminal)
    confirm("Start?", yes=yes)
    try:
        save_run_digest(store.url, run_digest(documents.create_run(store, record)))
    except AlreadyExists:
        _refuse_existing(store)
        raise
    keep_options(storage)
    _start(store, record, "up", controller, output, detach=detach)


def check_notify_urls(spec: RunSpec, terminal: Console) -> None:
    """Print a line for each unset variable of `notify.url_env`. Raises Stop for a URL that apprise cannot use."""
    urls = notify_urls(spec, os.environ)
    for name in spec.notify.url_env:
        if name not in urls:
            terminal.print(f"{name} is not set: export it to get its notifications")
        elif not is_service_url(urls[name]):
            raise Stop(f"{name}: {EXPECTED_SERVICE_URL}")


def resume(
    target: Target = None,
    detach: Detach = False,
    remote: Remote = False,
    budget_usd: Annotated[
        float | None, typer.Option("--budget-usd", min=0, help="Set a new `budget.usd` for the run.")
    ] = None,
    changes: Changes = None,
    output: AsJson = Output.TEXT,
) -> None:
    """Resume a run that was stopped or has lost its daemon or machines.

    With --set, change it or train further, from its newest checkpoint.
    """
    if budget_usd is not None and not math.isfinite(budget_usd):
        raise Stop(f"--budget-usd {budget_usd}: expected a number of USD, as in 500")
    storage = storage_of(target)
    store = open_store(storage)
    record = record_of(store)
    _refuse_held(store)
    state = journal.recover(store).state
    changes = [*(changes or []), *_changed_steps(target, record.spec, changes)]
    if changes:
        rollback(target, to="latest", changes=changes, output=output)
        if not detach:
            attach(store, output)
        return
    if state.phase is RunPhase.FINISHED and not state.nodes:
        raise Stop(
            f"{record.spec.name} is finished; see `grpo-orch report {store.quoted}`, or "
            f"{more_steps(store, record.spec)}",
            exit_codes.OK,
        )
    has_diverged = state.phase in (RunPhase.PAUSED, RunPhase.GAVE_UP) and not state.money.is_reached
    if has_diverged and not state.nodes:
        raise Stop(
            f"{record.spec.name} {state.reason}; continue from an earlier checkpoint with changed "
            f"hyperparameters: grpo-orch rollback {store.quoted}"
        )
    refuse_missing_secrets(record.spec)
    check_notify_urls(record.spec, text_terminal(output))
    controller = controller_of(record, store, wanted=remote)
    if controller is not None:
        refuse_unknown_machines(controller, store, sorted(state.nodes))
    elif record.spec.cloud != "local":
        _refuse_other_secret(store, record, sorted(state.nodes))
    probe(store)
    keep_options(storage)
    if budget_usd is not None:
        documents.send_command(store, BUDGET, time.time(), changes={"usd": budget_usd})
    _start(store, record, "resume", controller, output, detach=detach)


def _changed_steps(target: str | None, own: RunSpec, changes: list[str] | None) -> list[str]:
    """Return the `--set` change for a different `max_steps` in the run.yaml named as target.

    Raises Stop, naming the keys, if that file differs from the run's copy in any other key.
    """
    file = Path(target or "run.yaml")
    if file.suffix not in (".yaml", ".yml") or not file.is_file():
        return []
    try:
        wanted = load(file).spec
    except ConfigError:
        return []  # the run uses its own copy
    changed = changed_keys(own, wanted)
    steps = changed.pop("grpo.max_steps", None)
    if changed:
        keys = "; ".join(
            f"{key}: {in_file} in the file, {in_run} in the run"
            for key, (in_run, in_file) in sorted(changed.items())
        )
        raise Stop(
            f"{file} differs from the run's own copy, which resume uses ({keys}). "
            f"Revert the changes, start a new run with another `storage:`, or name the run by its store URL. "
            f"`--set` can change these keys of grpo: {', '.join(CHANGEABLE)}"
        )
    named = {change.partition("=")[0] for change in changes or []}
    return [] if steps is None or "max_steps" in named else [f"max_steps={steps[1]}"]


# Sections of run.yaml that affect training; the others only affect where and how it runs.
_COMPARED = ("grpo", "trainer", "rollout", "policies", "checkpoints")
_NOT_COMPARED = ("resources", "env", "setup")


def changed_keys(own: RunSpec, wanted: RunSpec) -> dict[str, tuple[object, object]]:
    """Return (value in the run, wanted value) of each changed key that affects training."""
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


def _start(
    store: Store,
    record: RunRecord,
    reason: str,
    controller: RemoteController | None,
    output: Output,
    *,
    detach: bool,
) -> None:
    """Start the run's daemon, as a process here or on a controller machine, and watch the run unless `detach`."""
    remember_run(store.url)
    pid = None
    watch, stop = f"grpo-orch status -w {store.quoted}", f"grpo-orch down {store.quoted}"
    try:
        if controller is not None:
            start_remote(controller, store, reason)
        else:
            run_token(record.run_id)
            pid = start_daemon(store, record, reason)
            start_rehearsal(store, record)
    except AlreadyControlled:
        _refuse_held(store)
        raise
    except KeyboardInterrupt:  # the daemon does not receive it
        hint = f"watch it with `{watch}`, stop it with `{stop}`"
        message = f"{record.spec.name} has started and keeps running in the background; {hint}"
        raise Stop(message, exit_codes.INTERRUPTED) from None
    cluster = None if controller is None else controller.cluster
    where = f"(pid {pid})" if cluster is None else f"on {cluster}; that machine stays until `{stop}`"
    text = f"The daemon for {record.spec.name} is running {where}."
    document = {"run": record.spec.name, "pid": pid, "controller": cluster, "store": store.url}
    print_result(output, document, f"{text}\nWatch it with: {watch}" if detach else text)
    if not detach:
        attach(store, output)


def _refuse_existing(store: Store) -> None:
    """Raise Stop if the store already holds a run."""
    _refuse_held(store)
    if store.get_or_none("run.json") is not None:
        raise Stop(
            f"{store.url} already holds a run; continue it with `grpo-orch resume {store.quoted}`, "
            "or name another `storage:`"
        )


def _refuse_held(store: Store) -> None:
    if has_daemon(store) and (lease := documents.LEASE.read(store, UnreadableDocuments())):
        raise Stop(
            f"{store.url} already has a daemon: pid {lease.pid} on {lease.host} (epoch {lease.epoch}); "
            f"watch it with `grpo-orch status -w {store.quoted}`, stop it with `grpo-orch down {store.quoted}`",
            exit_codes.HELD,
        )


def _refuse_other_secret(store: Store, record: RunRecord, nodes: list[str]) -> None:
    """Raise Stop if running machines would reject new machines, because this machine has another secret."""
    mark, token = documents.SECRET_MARK.read(store), known_token(record.run_id)
    if nodes and mark is not None and (token is None or mark != token_mark(token)):
        raise Stop(
            f"{', '.join(nodes)} were started with a secret that this machine does not have; copy "
            f"{token_file(record.run_id)} from the machine that started them, or return them first with "
            f"`grpo-orch down {store.quoted}`",
            exit_codes.FAILED,
        )


def show_plan(
    record: RunRecord,
    store: Store,
    controller: RemoteController | None,
    find_size: FindSize,
    terminal: Console = console,
) -> None:
    """Print the machines that will be started and their cost and, except for an evaluation, a step's time."""
    spec: RunSpec = record.spec
    offers = open_cloud(record, store).offers()
    table = Table("node", "market", "machine", "USD/h", title=f"{spec.name} on {spec.cloud}", title_justify="left")
    for offer in offers:
        table.add_row(offer.role, offer.market, _machine(offer), f"{offer.price_usd_per_h:.2f}")
    controller_usd_per_h = 0.0
    if controller is not None:
        best = controller.offer()
        controller_usd_per_h = best.price_usd_per_h
        machine = f"{best.infra} {best.instance_type}"
        table.add_row("controller", Market.ON_DEMAND, machine, f"{controller_usd_per_h:.2f}")
    plan = make_plan(spec, find_size, by_offers(offers, controller_usd_per_h))
    table.add_section()
    table.add_row("total", "", f"store {spec.storage}", f"{plan.max_usd_per_h or 0:.2f}")
    terminal.print(table)
    if record.evaluation is None:
        terminal.print(render_short(plan))


def _machine(offer: Offer) -> str:
    if offer.other_market_usd_per_h is None:
        return offer.description
    return f"{offer.description} ({offer.market.other} {offer.other_market_usd_per_h:.2f})"
