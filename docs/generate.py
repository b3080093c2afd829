"""Writes the pages of docs/ that come from the code, and tables in others: `make pages`.

Their words are docstrings, help texts and comments of the code that they describe: improve them there.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from aiohttp import hdrs
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from typer.main import get_command

from docs import arcs, trl_fields
from grpo_orch.checkpoint.records.metrics import MetricsRow, StepTiming
from grpo_orch.orchestrator import cli
from grpo_orch.orchestrator.cli import EXAMPLES, options
from grpo_orch.orchestrator.config.effective import MAXIMUM, MINIMUM
from grpo_orch.orchestrator.config.foreign_keys import (
    REFUSED_GRPO,
    REFUSED_VLLM,
    SKYPILOT_RESOURCES,
    accelerate_table,
    grpo_table,
    lora_table,
    vllm_table,
)
from grpo_orch.orchestrator.config.json_schema import descriptions
from grpo_orch.orchestrator.config.problems import KeyPath
from grpo_orch.orchestrator.config.shorthand import TARGETS
from grpo_orch.orchestrator.config.structure import NOT_IN_FILE, is_required, kind_of, section_of
from grpo_orch.orchestrator.control.exporter import Exporter, Seen
from grpo_orch.orchestrator.gateway.routing.dispatch import Ledger
from grpo_orch.orchestrator.gateway.routing.gateway_members import Members
from grpo_orch.orchestrator.gateway.surface.gateway_app import Gateway
from grpo_orch.orchestrator.gateway.surface.metrics import Metrics
from grpo_orch.orchestrator.gateway.surface.session_log import SessionLog
from grpo_orch.orchestrator.home import SINKS
from grpo_orch.policies.model import events
from grpo_orch.policies.model.phases import NODE_EDGES, ROLLBACK_EDGES, RUN_EDGES, Phase
from grpo_orch.policies.model.spec import Rehearsed, RunSpec
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.serving import wire
from grpo_orch.policies.serving.membership import Member
from grpo_orch.policies.tick.snapshot import Snapshot, Trainer
from grpo_orch.tasks.rollout.vllm.guard import Guard

DOCS = Path(__file__).parent
MADE = "`make pages` writes this page from"  # the code that follows


def pages() -> dict[str, str]:
    """Return the text of each page and drawing by its name."""
    return {
        "phases.md": phases_page(),
        **{f"images/phases-{name.lower()}.svg": phases_drawing(edges) for name, edges in _PHASES.items()},
        "cli.md": cli_page(),
        "events.md": events_page(),
        "metrics.md": metrics_page(),
        "http.md": http_page(),
        **{name: _filled((DOCS / name).read_text()) for name in ("run-yaml.md", "trl.md")},
    }


def _table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a table; `head` names its columns, separated by commas."""
    columns = head.split(", ")
    lines = [columns, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    drawn = [f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines]
    return "\n".join([drawn[0], "|---" * len(columns) + "|", *drawn[1:]]) + "\n"


def _joined(text: str | None) -> str:
    """Return a docstring or a comment as one line."""
    return " ".join((text or "").split())


# Phases: a drawing and a table of edges for each table of `phases`.

_PHASES: dict[str, Mapping[Any, str]] = {"Node": NODE_EDGES, "Run": RUN_EDGES, "Rollback": ROLLBACK_EDGES}


def phases_page() -> str:
    """Return docs/phases.md."""
    tables = "\n".join(_phases(title, edges) for title, edges in _PHASES.items())
    return f"""# Phases

Every move that a node, a run and a rollback can make; any other raises `IllegalMove`. {MADE}
the tables in `policies/model/phases.py`. The first phase is at the top; moves down are on the right, moves up on
the left, in the colour of the phase that they leave. No move leaves a phase with a thick frame.

{tables}"""


def _phases(title: str, edges: Mapping[tuple[Phase, Phase], str]) -> str:
    rows = [(old or "none", new or "none", reason) for (old, new), reason in edges.items()]
    drawing = f"![Phases of a {title.lower()}](images/phases-{title.lower()}.svg)"
    return f"## {title}\n\n{drawing}\n\n{_table('from, to, why', rows)}"


def phases_drawing(edges: Mapping[tuple[Phase, Phase], str]) -> str:
    """Return the drawing of the moves between phases, which are in the order of their definition."""
    phases: list[Any] = [phase for edge in edges for phase in edge]
    kind: type[enum.Enum] = next(type(phase) for phase in phases if phase is not None)
    order = [*(["none"] if None in phases else []), *map(str, kind)]
    return arcs.drawing(order, [(str(old or "none"), str(new or "none")) for old, new in edges])


# The command line: Typer's own records of each command.

_TYPES = {"str": "TEXT", "path": "PATH", "int range": "N", "float range": "NUMBER", "list[str]": "TEXT"}
_SHARED = ("RUN", "-o, --output text|json", "--help")  # described once


def cli_page() -> str:
    """Return docs/cli.md."""
    root = get_command(cli.app)
    context = root.context_class(root, info_name="grpo-orch")
    commands = "\n".join(_commands(root, context))
    return f"""# Command line

Every command of `grpo-orch`; {MADE} their help.

- `RUN`: {get_args(options.Target)[1].help}
- `-o json` prints JSON; a command that fails before it has printed any prints `{{"error", "exit_code"}}`, except
  for a wrong command line.
- `--help` prints a command's help. `grpo-orch --version` prints the version, `grpo-orch --install-completion`
  installs completion for the current shell.

## Exit codes

{_table("code, meaning", ((str(code), text) for code, text in options.EXIT_CODES.items()))}
[operations.md](operations.md#exit-codes-of-the-trainer-and-the-nodes) has those of the run's processes.

{commands}"""


def _commands(group: Any, context: Any) -> Iterator[str]:
    """Yield a section for each command below the group, in the order of the help."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        inner = command.context_class(command, info_name=name, parent=context)
        if hasattr(command, "list_commands"):
            yield from _commands(command, inner)
        else:
            yield _command(command, inner)


def _command(command: Any, context: Any) -> str:
    flags, described = [], []
    for parameter in command.get_params(context):
        name, text = parameter.get_help_record(context)
        name = re.sub(r"<([^>]+)>", lambda found: _TYPES.get(found[1], found[1]), name)
        if parameter.param_type_name == "argument":
            name = name.partition(" ")[0].upper()
        elif name != "--help":
            flags.append(f"[{re.sub(r', --[a-z-]+', '', name)}]")
        if name not in _SHARED:
            described.append(f"- `{name}`: {_joined(text)}")
    arguments = [re.sub(r"[{}]", "", piece.upper()) for piece in command.collect_usage_pieces(context)[1:]]
    synopsis = " ".join([context.command_path, *flags, *arguments])
    title = context.command_path.partition(" ")[2]
    examples = "\n".join(["```", *EXAMPLES[title], "```"])
    parts = [f"## {title}", f"```\n{synopsis}\n```", _joined(command.help), "\n".join(described), examples]
    return "\n\n".join(part for part in parts if part) + "\n"


# The journal's events: docstrings and the comments behind fields.

_GROUPS = {
    "The run and its store": events.RunEvent,
    "Budget and capacity": events.MoneyEvent,
    "Machines and their work": events.MachineEvent,
    "Divergence and rollbacks": events.TimelineEvent,
}


def events_page() -> str:
    """Return docs/events.md."""
    groups = [
        f"## {title}\n\n"
        + _table(
            "event, meaning, fields",
            ((f"`{kind.__name__}`", _joined(kind.__doc__), _fields(kind)) for kind in get_args(union)),
        )
        for title, union in _GROUPS.items()
    ]
    values = [
        (f"`{name}`", _values(kind)) for name, kind in sorted(_own_types(*events.EVENT_TYPES.values()).items())
    ]
    return f"""# Events

Every event of a run's journal. {MADE} `policies/model/events.py`.
[operations.md](operations.md#what-does-this-event-mean) says what to do about the important ones.

`grpo-orch events -o json` prints a line of JSON for each event: `number` and `epoch` of its journal entry,
`time_s`, `type`, the event's fields, and `text`, the sentence that `grpo-orch events` prints. None is null.
A fault that `rehearse` injects is a line of the type `RehearsedFault`, with `fault`, `target`, `at_step` and
`detail`; its `number` counts these faults, and its `epoch` is 0.

{chr(10).join(groups)}
## Types of fields

{_table("type, values or fields", values)}"""


def _own_types(*kinds: type) -> dict[str, type]:
    """Return this project's types among those of the fields, and of their fields, by name."""
    found: dict[str, type] = {}
    for hint in (hint for kind in kinds for hint in get_type_hints(kind).values()):
        for part in (hint, *get_args(hint)):
            if isinstance(part, type) and part.__module__.startswith(events.__package__):
                found |= {part.__name__: part, **({} if issubclass(part, enum.Enum) else _own_types(part))}
    return found


def _fields(kind: type) -> str:
    """Return the fields with their comments; those of this project's types with their types."""
    comments = dict(re.findall(r"^    (\w+): [^#\n]*# (.*)$", inspect.getsource(kind), re.MULTILINE))
    cells = []
    for name, hint in get_type_hints(kind).items():
        named = next((part.__name__ for part in (hint, *get_args(hint)) if part in _own_types(kind).values()), "")
        notes = [note for note in (named and f"`{named}`", comments.get(name)) if note]
        cells.append(f"`{name}`" + (f" ({'; '.join(notes)})" if notes else ""))
    return ", ".join(cells) or "none"


def _values(kind: type) -> str:
    if issubclass(kind, enum.Enum):
        comments = dict(re.findall(r'^    \w+ = "(\w+)"  # (.*)$', inspect.getsource(kind), re.MULTILINE))
        notes = {str(value): comments.get(str(value)) for value in kind}
        return ", ".join(f"`{value}`" + (f" ({note})" if note else "") for value, note in notes.items())
    return f"{_joined(kind.__doc__)} Fields: {_fields(kind)}"


# Metrics: what the exporters give for a run in which every metric has a value.


def metrics_page() -> str:
    """Return docs/metrics.md."""
    return f"""# Metrics

Every Prometheus metric of the daemon and of the gateway. {MADE} what they export.

## Daemon

With `metrics_port` in run.yaml the daemon serves `GET /metrics` on 127.0.0.1
([monitoring.md](monitoring.md#prometheus-and-grafana)). Metrics of the run start with the first tick, those of a
step with the first [timed step](staleness.md#what-a-run-shows); counters of losses and ticks start at 0 with each
daemon. Metrics of the process begin with `grpo_daemon_process_`.

{_metrics(_daemon_registry())}
## Gateway

The [gateway](gateway.md) serves `GET /metrics` next to its API. Counters start at 0 with the gateway. `policy_*`
are of the newest policy that a member holds. Metrics of the process begin with `grpo_gateway_process_`.

{_metrics(_gateway_registry())}"""


def _daemon_registry() -> CollectorRegistry:
    exporter = Exporter("demo")
    trainer = Trainer("trainer-0-i0", 1, 0, 1, 2, "training", 0.0, stored_step=1)
    row = MetricsRow(0, 1, 0.0, 1, {"kl": 0.0, "reward": 0.0})
    timing = StepTiming(1.0, 1.0, 1.0, 1.0, trainer_idle_s=0.0, fleet_idle_s=0.0, staleness=0.0)
    exporter.ticked(RunState(), (), Seen(RunState(), Snapshot(0.0, trainer=trainer), row, timing, 0.0))
    return exporter.registry


def _gateway_registry() -> CollectorRegistry:
    """Return the metrics of a gateway with a policy that a member holds."""
    members = Members("secret")
    members.version_spreads.want("0-1", [Member(1, "a", "boot", "host:1", None, 1, 0.0)], 0.0)
    members.version_spreads.record("a", wire.Announce("boot", "host:1", "0-1"), 0.0)
    return Metrics(members, Ledger()).registry


def _metrics(registry: CollectorRegistry) -> str:
    families = [family for family in registry.collect() if "_process_" not in family.name]
    return _table("metric, type, labels, meaning", map(_metric, families))


def _metric(family: Metric) -> tuple[str, str, str, str]:
    name = family.name + ("_total" if family.type == "counter" else "")
    labels = ", ".join(f"`{label}`" for label in getattr(family, "_labelnames", ()))
    return f"`{name}`", family.type, labels, family.documentation


# HTTP: the gateway's routes with their handlers' docstrings, and the cases of a node's guard.


def http_page() -> str:
    """Return docs/http.md."""
    app = Gateway("boot", "secret", SessionLog(None, None)).app()
    routes = sorted(
        (route.resource.canonical, route.method, _joined(inspect.getdoc(route.handler)))
        for route in app.router.routes()
        if route.method != hdrs.METH_HEAD and route.resource is not None
    )
    return f"""# HTTP

The requests that the gateway and the rollout nodes answer. {MADE} their routes. Every
request carries `Authorization: Bearer TOKEN`, the run's secret, and on addresses other than loopback the run's
certificate ([011](decisions/011-mutual-tls.md)).

## Gateway

[gateway.md](gateway.md) describes limits, errors, sessions, and the use with an OpenAI client.

{_table("request, what it does", ((f"`{method} {path}`", text) for path, method, text in routes))}
## Rollout node

A node's vLLM answers these requests of the gateway, of the node's own agent, and no others.

{_table("request, from, what it does", _guarded())}"""


def _guarded() -> Iterator[tuple[str, str, str]]:
    """Yield request, client and meaning of each case of the guard."""
    source = inspect.getsource(Guard)
    for method, paths, agent, text in re.findall(r'case \("(\w+)", ([^)]*)\)( if is_agent)?:  # (.*)', source):
        named = [
            getattr(wire, path[5:]) if path.startswith("wire.") else path.strip('"') for path in paths.split(" | ")
        ]
        yield ", ".join(f"`{method} {path}`" for path in named), "agent" if agent else "gateway", text


# Tables in pages that people write: each between two comments, `<!-- NAME ARGUMENT -->` and `<!-- end -->`.


def _filled(page: str) -> str:
    """Return the page with its tables written again."""

    def written(marked: re.Match[str]) -> str:
        head, name, argument = marked.groups()
        return f"{head}\n\n{_TABLES[name](argument)}\n<!-- end -->"

    return re.sub(r"(<!-- (\w+) ?(\S*) -->)\n.*?<!-- end -->", written, page, flags=re.DOTALL)


_KINDS = {"str": "string", "int": "whole number", "float": "number", "bool": "true or false", "dict": "mapping"}
_KINDS |= {"dict[str]": "mapping of strings", "list[str]": "list of strings", "list[int]": "list of whole numbers"}
_KINDS |= {"list[dict]": "list of mappings"}


def _keys(dotted: str) -> str:
    """Return the table of the keys of a section of run.yaml; without a path, of the file."""
    path = tuple(dotted.split(".")) if dotted else ()
    section: Any = RunSpec
    for key in path:
        section = section_of(get_type_hints(section)[key])
    hints, texts = get_type_hints(section), descriptions(section)
    rows = [
        (f"`{field.name}`", _type(hints[field.name], (*path, field.name)), _default(field), texts[field.name])
        for field in dataclasses.fields(section)
        if field.name not in NOT_IN_FILE
    ]
    return _table("key, type, default, meaning", rows)


def _type(hint: Any, path: KeyPath) -> str:
    """Return the type or the choices of a key, with the bounds of a number."""
    if section_of(hint):
        return "section"
    kind = kind_of(hint)
    if kind.choices:
        return ", ".join(f"`{choice}`" for choice in kind.choices)
    names = [_KINDS[name] for name in kind.type.split(" | ") if name in _KINDS]
    minimum, is_exclusive = MINIMUM.get(path, (None, False))
    bounds = [] if minimum is None else [f"{'>' if is_exclusive else '≥'} {minimum:g}"]
    bounds += [f"≤ {MAXIMUM[path]:g}"] if path in MAXIMUM else []
    return " or ".join(names) + (f" {', '.join(bounds)}" if bounds else "")


def _default(field: dataclasses.Field[Any]) -> str:
    if is_required(field):
        return "required"
    if field.default is dataclasses.MISSING or field.default in (None, (), ""):
        return ""
    return str(field.default).lower() if isinstance(field.default, bool) else f"{field.default}"


def _refused(section: str) -> str:
    """Return the table of the refused keys of `grpo` or `vllm`; those with the same reason share a row."""
    keys: dict[str, list[str]] = {}
    for key, reason in {"grpo": REFUSED_GRPO, "vllm": REFUSED_VLLM}[section].items():
        keys.setdefault(reason, []).append(f"`{key}`")
    return _table("key, why", ((", ".join(names), reason) for reason, names in keys.items()))


def _faults(_: str) -> str:
    texts, fields = descriptions(Rehearsed), {field.name: field for field in dataclasses.fields(Rehearsed)}
    targets = [(f"`{kind}`", ", ".join(f"`{target}`" for target in names), "") for kind, names in TARGETS.items()]
    steps, *times = [(f"`{key}`", texts[key], _default(fields[key])) for key in ("at_step", "notice_s", "for_s")]
    return _table("key, value, default", [steps, *targets, *times])


def _services(_: str) -> str:
    rows = ((", ".join(f"`{name}`" for name in names), f"`{sink}`") for sink, names in SINKS.items())
    return _table("variables, service", rows)


def _versions(_: str) -> str:
    tables = (grpo_table(), lora_table(), accelerate_table(), vllm_table())
    names = [table.vocabulary.partition("(")[2].rstrip(")") for table in tables]
    skypilot = re.findall(r"[\d.]+", SKYPILOT_RESOURCES)[0]
    checked = f"{', '.join(names)} and SkyPilot {skypilot}"
    return f"Keys of other projects keep their names and are checked against {checked}.\n"


def _trl(rows: Iterable[trl_fields.Row]) -> str:
    cells = ((", ".join(f"`{name}`" for name in row.names.split()), row.state, row.details) for row in rows)
    return _table("name, state, details and tests", cells)


_TABLES: dict[str, Callable[[str], str]] = {
    "keys": _keys,
    "refused": _refused,
    "faults": _faults,
    "services": _services,
    "versions": _versions,
    "arguments": lambda _: _trl(trl_fields.ARGUMENTS),
    "fields": lambda _: _trl(trl_fields.field_rows()),
}


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text)
